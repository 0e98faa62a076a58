"""The coordinator client: signatures both ways, trust, clocks, refusals, deadlines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.wire import messages as wire
from coordinator.wire.signing import public_hex
from worker_node.adapters.coordinator_client import CoordinatorClient, Deadlines
from worker_node.domain.events import Outcome
from worker_node.errors import CallError, TrustError

Make = Callable[..., CoordinatorClient]


@pytest.fixture
async def client_of(coordinator: Any) -> AsyncIterator[Make]:
    made: list[CoordinatorClient] = []

    def make(**changes: Any) -> CoordinatorClient:
        values: dict[str, Any] = {"key": Ed25519PrivateKey.generate(), "coordinator_key": coordinator.public}
        made.append(CoordinatorClient(coordinator.url, **{**values, **changes}))
        return made[-1]

    yield make
    for client in made:
        await client.close()


def joining(client: CoordinatorClient, key: Ed25519PrivateKey) -> Any:
    return client.join(
        wire.JoinRequest(
            public_key=public_hex(key),
            name="w",
            engine=wire.EngineInfo(kind="scripted", version="1", dtype="float32"),
            price_uusd_per_hour=350_000,
            max_slots=4,
        )
    )


async def test_calls_are_signed_and_answered(coordinator: Any, client_of: Make) -> None:
    """Join, beat, account, leave: the coordinator checks each signature, the client each reply's."""
    await coordinator.start()
    key = Ed25519PrivateKey.generate()
    client = client_of(key=key)
    welcome = await joining(client, key)
    assert welcome.worker_id == client.worker
    beat = await client.heartbeat(wire.Heartbeat(session_epoch=welcome.session_epoch))
    assert beat.state == "active"
    assert (await client.account(welcome.session_epoch)).earned_uusd == 5
    await client.leave(wire.Leave(session_epoch=welcome.session_epoch, reason="done"))
    assert coordinator.left == ["done"]
    assert client.trust is not None
    assert client.trust.how == "loopback"


async def test_a_reply_without_the_coordinators_signature_is_worth_a_retry_only(
    coordinator: Any, client_of: Make, refused: Any
) -> None:
    """Neither a grant nor a fatal refusal counts when something in between could have written it."""
    await coordinator.start()
    coordinator.sign_replies = False
    key = Ed25519PrivateKey.generate()
    client = client_of(key=key)
    with pytest.raises(CallError) as caught:
        await joining(client, key)
    assert (caught.value.code, caught.value.outcome) == ("unsigned_reply", Outcome.TRY_AGAIN)

    def refuse(_route: str, _request: web.Request) -> None:
        raise refused(403, "invite_used")

    coordinator.before = refuse
    with pytest.raises(CallError) as caught:
        await joining(client, key)
    assert (caught.value.code, caught.value.outcome) == ("unsigned_reply", Outcome.TRY_AGAIN)


async def test_a_reply_to_another_request_is_not_accepted(coordinator: Any, client_of: Make) -> None:
    """The signature covers the request's nonce: a recorded reply is worthless."""
    await coordinator.start()
    key = Ed25519PrivateKey.generate()
    client = client_of(key=key)
    await joining(client, key)
    signed = coordinator.key
    coordinator.key = Ed25519PrivateKey.generate()
    with pytest.raises(CallError) as caught:
        await client.account(1)
    assert caught.value.code == "unsigned_reply"
    coordinator.key = signed
    assert await client.account(1)


@pytest.mark.parametrize(
    ("status", "code", "outcome"),
    [
        (409, "old_session", Outcome.FENCED),
        (409, "worker_gone", Outcome.REJOIN),
        (401, "unknown_worker", Outcome.REJOIN),
        (426, "protocol_version", Outcome.FATAL),
        (403, "price_above_ceiling", Outcome.REFUSED),
        (422, "invalid_message", Outcome.REFUSED),
        (503, "busy", Outcome.TRY_AGAIN),
        (429, "too_many_requests", Outcome.TRY_AGAIN),
        (500, "internal", Outcome.TRY_AGAIN),
    ],
)
async def test_refusals_are_typed(
    coordinator: Any, client_of: Make, refused: Any, status: int, code: str, outcome: Outcome
) -> None:
    """Each code means one thing to the session; the words carry the fix, the retry time is kept."""
    await coordinator.start()

    def refuse(_route: str, _request: web.Request) -> None:
        raise refused(status, code, fix="do this", retry_after_s=3.0)

    coordinator.before = refuse
    key = Ed25519PrivateKey.generate()
    with pytest.raises(CallError) as caught:
        await joining(client_of(key=key), key)
    assert caught.value.outcome is outcome
    assert caught.value.retry_after_s == 3.0
    assert str(caught.value) == f"refused: {code} [{code}]; do this"


@pytest.mark.parametrize("off_s", [-4000.0, 5000.0])
async def test_a_wrong_clock_is_corrected_by_the_servers_time(coordinator: Any, client_of: Make, off_s: float) -> None:
    """The worker's clock may be an hour off: every call works, and the offset is known."""
    await coordinator.start()
    key = Ed25519PrivateKey.generate()
    client = client_of(key=key, clock=lambda: time.time() + off_s)
    await joining(client, key)
    assert abs(client.offset_s + off_s) < 5.0
    assert abs(client.server_now() - time.time()) < 5.0


async def test_a_clock_that_jumps_is_corrected_once_and_the_call_repeated(coordinator: Any, client_of: Make) -> None:
    """A clock_skew refusal costs one repetition."""
    await coordinator.start()
    jump = [0.0]
    key = Ed25519PrivateKey.generate()
    client = client_of(key=key, clock=lambda: time.time() + jump[0])
    await joining(client, key)
    jump[0] = 900.0
    await client.account(1)
    assert coordinator.requests["account"] == 2
    await client.account(1)
    assert coordinator.requests["account"] == 3


async def test_a_clock_that_no_offset_can_save_is_an_error_in_words(coordinator: Any, client_of: Make, refused: Any) -> None:
    """No endless repetition."""
    await coordinator.start()

    def refuse(route: str, _request: web.Request) -> None:
        raise refused(401, "clock_skew", server_time=time.time())

    coordinator.before = refuse
    key = Ed25519PrivateKey.generate()
    with pytest.raises(CallError, match="synchronise this machine's clock"):
        await joining(client_of(key=key), key)
    assert coordinator.requests["join"] == 2


async def test_a_self_signed_certificate_is_trusted_by_the_coordinators_statement(coordinator: Any, client_of: Make) -> None:
    """The web's roots do not know it; the pinned key vouches for it; then only it is accepted."""
    await coordinator.start(tls=True)
    key = Ed25519PrivateKey.generate()
    client = client_of(key=key)
    await joining(client, key)
    assert client.trust is not None
    assert client.trust.how == "pinned certificate"


async def test_a_certificate_without_a_valid_statement_is_refused(coordinator: Any, client_of: Make) -> None:
    """Somebody in between can copy a statement, but not one for his own certificate."""
    await coordinator.start(tls=True)
    coordinator.statement_for = "ab" * 32
    with pytest.raises(TrustError, match="somebody may be in between"):
        await client_of().connect()
    coordinator.statement_for = None
    with pytest.raises(TrustError, match="somebody may be in between"):
        await client_of().connect()


async def test_a_certificate_that_changes_while_it_is_looked_at_is_worth_another_try(
    coordinator: Any, client_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that was looked at is not the one that is served next."""
    await coordinator.start(tls=True)
    client = client_of()
    with monkeypatch.context() as patched:

        async def before_it_changed(_: Any) -> str:
            return "ab" * 32

        patched.setattr("worker_node.adapters.trust.served_certificate", before_it_changed)
        with pytest.raises(CallError, match="changed between two connections") as caught:
            await client.connect()
    assert caught.value.outcome is Outcome.TRY_AGAIN
    assert (await client.connect()).how == "pinned certificate"


async def test_a_statement_signed_by_another_key_is_refused(coordinator: Any, client_of: Make) -> None:
    """The identity names the right key but cannot sign with it."""
    await coordinator.start(tls=True)
    coordinator.identity_key = coordinator.public
    coordinator.key = Ed25519PrivateKey.generate()
    with pytest.raises(TrustError, match="somebody may be in between"):
        await client_of().connect()


async def test_another_coordinator_than_the_invites_is_refused(coordinator: Any, client_of: Make) -> None:
    """The invite pins the identity, over plain http on loopback too."""
    await coordinator.start()
    with pytest.raises(TrustError, match="the invite is for"):
        await client_of(coordinator_key="ab" * 32).connect()


@pytest.mark.parametrize("url", ["http://192.0.2.1:9", "ftp://127.0.0.1", "http://localhost.example:9"])
async def test_plain_http_is_for_loopback_only(coordinator: Any, url: str) -> None:
    """Refused before anything is sent."""
    client = CoordinatorClient(url, key=Ed25519PrivateKey.generate(), coordinator_key=coordinator.public)
    with pytest.raises(TrustError, match="https"):
        await client.connect()
    await client.close()


async def test_a_silent_coordinator_meets_the_deadline(coordinator: Any, client_of: Make) -> None:
    """No call waits for ever."""
    await coordinator.start()
    key = Ed25519PrivateKey.generate()
    client = client_of(key=key, deadlines=Deadlines(account=0.2))
    await joining(client, key)

    async def never(_request: web.Request, _body: bytes) -> wire.Account:
        await asyncio.sleep(30.0)
        raise AssertionError("unreachable")

    coordinator.on_account = never
    with pytest.raises(CallError) as caught:
        await client.account(1)
    assert (caught.value.code, caught.value.outcome) == ("timeout", Outcome.TRY_AGAIN)


async def test_nobody_there_is_worth_a_retry(coordinator: Any, client_of: Make) -> None:
    """The message names the address."""
    await coordinator.start()
    await coordinator.stop()
    with pytest.raises(CallError) as caught:
        await client_of().connect()
    assert caught.value.outcome is Outcome.TRY_AGAIN
    assert coordinator.url in str(caught.value)


async def test_a_page_that_is_no_coordinator_says_so(coordinator: Any, client_of: Make) -> None:
    """A wrong URL is told from a wrong key."""

    async def page(_request: web.Request) -> web.Response:
        return web.Response(text="<h1>hello</h1>")

    coordinator.identity = page
    await coordinator.start()
    with pytest.raises(CallError, match="no coordinator's identity"):
        await client_of().connect()


async def test_a_piece_larger_than_asked_is_cut_off(coordinator: Any, client_of: Make) -> None:
    """The declared size bounds memory."""
    await coordinator.start()
    key = Ed25519PrivateKey.generate()
    client = client_of(key=key)
    await joining(client, key)

    async def big(_request: web.Request, _body: bytes) -> bytes:
        return b"x" * 2_000_000

    coordinator.on_piece = big
    with pytest.raises(CallError) as caught:
        await client.piece("job", "ab" * 32, 1000, epoch=1)
    assert caught.value.code == "reply_too_large"


async def test_a_connection_that_the_server_closed_while_idle_costs_no_failure(coordinator: Any, client_of: Make) -> None:
    """The call is repeated once on a fresh connection, under a fresh nonce."""
    await coordinator.start()
    key = Ed25519PrivateKey.generate()
    client = client_of(key=key)
    await joining(client, key)
    dropped: list[str] = []

    def drop(route: str, request: web.Request) -> None:
        if not dropped:
            dropped.append(route)
            assert request.transport is not None
            request.transport.abort()

    coordinator.before = drop
    assert (await client.account(1)).earned_uusd == 5
    assert dropped == ["account"]
    assert coordinator.requests["account"] == 2
