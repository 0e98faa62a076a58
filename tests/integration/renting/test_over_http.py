"""The same sequences over real HTTP on loopback, and what the shell does with keys, sizes and time."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import aiohttp
import pytest
import structlog
from aiohttp import web

from coordinator.adapters.providers import HttpSender, RemoteProvider, read_key
from coordinator.errors import CannotServe
from pricing.feeds.contract import MOST_BODY_BYTES, Answer, Call, Failed, Handle, Need, Offers, Trouble
from pricing.feeds.runpod import RunPod
from pricing.feeds.vast import Vast
from tests.integration.renting.scene import CRASHES, Scene, feed_of
from tests.integration.renting.sequences import FATES
from tests.standin.desk import KEY
from tests.standin.here import serving, standin

LOST_S = 0.4
CALL_S = 0.2


class Impatient(RemoteProvider):
    """Deadlines of a fraction of a second, so that lost replies cost the test no more."""

    def __init__(self, feed: Any, send: Any) -> None:
        super().__init__(feed, send, call_s=CALL_S)


@pytest.mark.parametrize("seed", range(6))
async def test_fault_sequences_over_http(stores, seed):
    rng = Random(f"http {seed}")
    kind = ("vast", "runpod")[seed % 2]
    there = standin(kind, rng, fates=FATES, share=0.08, storm_share=0.004)
    async with serving(there, lost_s=LOST_S) as url, aiohttp.ClientSession() as session:
        sender = HttpSender(session, url, KEY)
        scene = Scene(await stores(), there, feed_of(kind), sender, rng, budget_uusd=3_000_000, caller=Impatient)
        await scene.open()
        for turn in range(20):
            if rng.random() < 0.25:
                scene.crash_at = rng.choice(CRASHES)
            await scene.turn(2 if turn % 7 else 1, down_s=rng.uniform(0.0, 200.0))
            there.world.advance(rng.uniform(10.0, 60.0))
        await scene.end()
    assert not scene.violations
    assert there.world.instances  # it rented


@pytest.mark.parametrize("kind", ["vast", "runpod"])
async def test_a_machine_from_search_to_end(kind):
    """Search, create, list, get, destroy, gone: every reply read, every request as the documents have it."""
    there = standin(kind, Random(1))
    async with serving(there, lost_s=LOST_S) as url, aiohttp.ClientSession() as session:
        provider = RemoteProvider(Vast() if kind == "vast" else RunPod(), HttpSender(session, url, KEY))
        found = await provider.search(Need(), now=1.0)
        assert isinstance(found, Offers)
        from tests.unit.pricing.feeds.answers import LABEL, SPEC

        made = await provider.create(found.offers[0], SPEC, LABEL)
        assert isinstance(made, Handle)
        look = await provider.look("echo2-")
        assert not isinstance(look, Failed)
        assert (look.partial, [one.label for one in look.handles]) == ("", [LABEL])
        assert look.at == pytest.approx(there.world.now, abs=2)
        assert await provider.get(made.id) == look.handles[0]
        assert await provider.destroy(made.id) is None
        gone = await provider.get(made.id)
        assert isinstance(gone, Failed)
        assert gone.trouble is Trouble.GONE
    assert there.world.violations == []
    assert there.world.rented() == []


@asynccontextmanager
async def _answering(handle: Any) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_a_redirect_is_not_followed_because_the_key_would_travel_along():
    asked = []

    async def handle(request):
        asked.append(request.path)
        raise web.HTTPFound("/elsewhere")

    async with _answering(handle) as url, aiohttp.ClientSession() as session:
        answer = await HttpSender(session, url, "sk-of-this-test")(Call("GET", "/v2/pods"))
    assert (answer.status, asked) == (302, ["/v2/pods"])


async def test_an_endless_body_is_cut_and_refused():
    async def handle(request):
        reply = web.StreamResponse()
        await reply.prepare(request)
        try:
            for _ in range(2 * MOST_BODY_BYTES // (1 << 20)):
                await reply.write(b"[" * (1 << 20))
        except ConnectionError:
            pass
        return reply

    async with _answering(handle) as url, aiohttp.ClientSession() as session:
        look = await RemoteProvider(RunPod(), HttpSender(session, url, "sk-of-this-test")).look("echo2-")
    assert isinstance(look, Failed)
    assert look.trouble is Trouble.MALFORMED
    assert "more than" in look.words


async def test_the_key_is_in_the_header_and_in_no_word_that_is_logged():
    """Even when the provider repeats it."""
    headers = []

    async def handle(request):
        headers.append(request.headers["Authorization"])
        return web.Response(status=401, text="the key sk-secret is wrong")

    async with _answering(handle) as url, aiohttp.ClientSession() as session:
        with structlog.testing.capture_logs() as logs:
            failed = await RemoteProvider(Vast(), HttpSender(session, url, "sk-secret")).look("echo2-")
    assert headers == ["Bearer sk-secret"]
    assert isinstance(failed, Failed)
    assert failed.words == "401: the key [key] is wrong"
    assert "sk-secret" not in repr(logs)


async def test_a_list_that_does_not_end_is_incomplete():
    async def handle(request):
        return web.json_response({"success": True, "instances": [], "next_token": "again"})

    async with _answering(handle) as url, aiohttp.ClientSession() as session:
        look = await RemoteProvider(Vast(), HttpSender(session, url, "sk-of-this-test")).look("echo2-")
    assert not isinstance(look, Failed)
    assert look.partial == "the list did not end after 2 pages"


async def test_a_list_that_takes_too_long_is_given_up():
    """Each page comes in time; all of them do not."""
    asked = []

    async def send(call):
        asked.append(call)
        await asyncio.sleep(0.01)
        return Answer(200, {}, json.dumps({"success": True, "instances": [], "next_token": str(len(asked))}).encode())

    failed = await RemoteProvider(Vast(), send, call_s=0.1, look_s=0.1).look("echo2-")
    assert isinstance(failed, Failed)
    assert (failed.trouble, failed.words) == (Trouble.UNKNOWN, "the list did not end within 0.1 s")


async def test_what_is_packed_is_not_unpacked():
    """16 MiB of zeros in 16 KiB: the limit counts bytes that come, so nothing may make more of them."""
    packed = gzip.compress(bytes(16 << 20))

    async def handle(request):
        assert request.headers["Accept-Encoding"] == "identity"
        return web.Response(body=packed, headers={"Content-Encoding": "gzip"})

    async with _answering(handle) as url, aiohttp.ClientSession() as session:
        answer = await HttpSender(session, url, "sk-of-this-test")(Call("GET", "/v2/pods"))
    assert answer.body == packed


async def test_nobody_listening_is_a_value():
    async with aiohttp.ClientSession() as session:
        sender = HttpSender(session, "http://127.0.0.1:9", "k")
        failed = await RemoteProvider(Vast(), sender).destroy("5")
    assert isinstance(failed, Failed)
    assert failed.trouble is Trouble.UNKNOWN


@pytest.mark.parametrize("url", ["http://console.vast.ai", "ftp://127.0.0.1", "console.vast.ai"])
async def test_a_key_is_sent_over_https_or_loopback_only(url):
    async with aiohttp.ClientSession() as session:
        with pytest.raises(CannotServe, match="https"):
            HttpSender(session, url, "sk-of-this-test")
        HttpSender(session, "https://console.vast.ai/", "k")
        HttpSender(session, "http://localhost:1", "k")
    await asyncio.sleep(0)


def test_a_key_file_must_be_private_and_hold_one_word(tmp_path):
    path = tmp_path / "key"
    path.write_text("sk-0123456789abcdef\n")
    path.chmod(0o644)
    with pytest.raises(CannotServe, match="chmod 600"):
        read_key(path)
    path.chmod(0o600)
    assert read_key(path) == "sk-0123456789abcdef"
    for wrong in ("two words that are long enough\n", "short\n", ""):
        path.write_text(wrong)
        with pytest.raises(CannotServe, match="no key") as error:
            read_key(path)
        assert "words that" not in str(error.value)
    with pytest.raises(CannotServe, match="cannot be read"):
        read_key(tmp_path / "absent")
