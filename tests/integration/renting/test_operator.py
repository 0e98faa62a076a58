"""What an operator writes, and what `echo2 serve` makes of it."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
import types
from random import Random

import aiohttp
import pytest

from coordinator.adapters.provider_file import provider_of, read_providers, renting_settings
from coordinator.adapters.providers import RemoteProvider
from coordinator.adapters.sky import MOST_CALLS, SkySender
from coordinator.app import coordinator
from coordinator.config import read_settings
from coordinator.errors import CannotServe
from coordinator.service.renting import deployment_prefix
from pricing.feeds.contract import Answer, Call, Failed, Handle, Need, Offers, RentalOffer, Shown, Trouble
from pricing.feeds.skypilot import SkyPilot
from tests.standin.desk import KEY
from tests.standin.here import serving, standin
from tests.unit.pricing.feeds.answers import LABEL, SPEC

FILE = """
[provider.vast]
url = "https://coordinator.example:7700"
image = "registry.example/echo2-worker:1"
budget_usd = 20.0
key_file = "{key}"
worker_options = ["--dtype", "bfloat16"]
[provider.vast.need]
cards = ["RTX 4090"]
min_vram_gb = 20
most_usd_per_hour = 0.6
[provider.vast.limits]
stop_s = 900
"""


@pytest.fixture
def key(tmp_path):
    path = tmp_path / "vast.key"
    path.write_text("sk-0123456789abcdef")
    path.chmod(0o600)
    return path


def _written(tmp_path, text):
    path = tmp_path / "providers.toml"
    path.write_text(text)
    return path


async def test_a_providers_file_becomes_settings(tmp_path, key):
    section = read_providers(_written(tmp_path, FILE.format(key=key))).provider["vast"]
    settings = renting_settings(section)
    assert (settings.budget_uusd, settings.need.min_vram_mb, settings.need.most_uusd_per_hour) == (20_000_000, 20_000, 600_000)
    assert (settings.limits.stop_s, settings.limits.appear_s, settings.worker_options) == (900.0, 120.0, ("--dtype", "bfloat16"))
    async with aiohttp.ClientSession() as session:
        assert provider_of("vast", section, session).name == "vast"
        assert provider_of("runpod", section, session).name == "runpod"
        assert provider_of("skypilot", section.model_copy(update={"key_file": None}), session).name == "skypilot"
        with pytest.raises(CannotServe, match="key_file is missing"):
            provider_of("vast", section.model_copy(update={"key_file": None}), session)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[provider.vast]\nbudget_usd = 0\nurl = 'https://u'\nimage = 'i'\n", "provider.vast.budget_usd is 0"),
        ("[provider.aws]\n", "provider.aws"),
        ("[provider.vast]\nbudget = 5\n", "provider.vast"),
        ("[provider.vast]\nurl = 'https://c'\nimage = 'i'\nbudget_usd = inf\n", "budget_usd is inf"),
        ("[provider.vast]\nurl = 'https://c;id'\nimage = 'i'\nbudget_usd = 1\n", "url is 'https://c;id'"),
        ("[provider.vast]\nurl = 'c:7700'\nimage = 'i'\nbudget_usd = 1\n", "with https://"),
        (
            "[provider.vast]\nurl = 'https://c'\nimage = 'i'\nbudget_usd = 1\nlook_s = 300\n[provider.vast.limits]\nblind_s = 400\n",
            "blind_s is 400: with look_s 300 give at least 510",
        ),
        ("provider = [\n", "is not TOML"),
    ],
)
def test_a_bad_file_is_one_clear_error(tmp_path, text, words):
    with pytest.raises(CannotServe, match=words):
        read_providers(_written(tmp_path, text))
    with pytest.raises(CannotServe, match="cannot be read"):
        read_providers(tmp_path / "absent.toml")


@pytest.mark.parametrize(
    "lines",
    [
        "key = 'sk-top-secret'\n",
        "key_file = 'sk-top-secret'\nurl = 'https://c'\nimage = 'i'\nbudget_usd = 1\n",
        "need = 'sk-top-secret'\nkey = 'sk-top-secret'\n",
        "token = 'sk-top-secret'\nurl = 'https://c'\nimage = 'i'\nbudget_usd = 1\n",
    ],
)
def test_a_key_that_was_put_in_the_file_by_mistake_is_not_repeated(tmp_path, lines):
    with pytest.raises(CannotServe) as error:
        read_providers(_written(tmp_path, f"[provider.vast]\n{lines}"))
    assert "secret" not in "".join(traceback.format_exception(error.value))


async def test_serve_rents_from_the_file_and_refuses_one_that_it_cannot_use(tmp_path, key):
    """The loop runs beside the others, with the key of the file, and a machine of a lost store is destroyed by it."""
    there = standin("vast", Random(2))
    key.write_text(KEY)
    async with serving(there, lost_s=0.1) as url:
        text = FILE.format(key=key).replace("[provider.vast.need]", f'look_s = 5\naddress = "{url}"\n[provider.vast.need]')
        settings = read_settings(data_dir=tmp_path / "home", port=0, libp2p=False, providers=_written(tmp_path, text))
        async with coordinator(settings) as served:
            orphan = there.world.rent(there.world.machines[0], f"{deployment_prefix(served.public_key)}1", {}, 100_000)
            while orphan.ended is None or "search" not in there.asked:
                await asyncio.sleep(0.05)
    assert {"list", "search", "destroy"} <= set(there.asked)
    assert there.world.violations == []
    key.chmod(0o644)
    with pytest.raises(CannotServe, match="chmod 600"):
        async with coordinator(settings):
            pass


async def test_without_sky_every_call_is_refused_in_words(monkeypatch):
    monkeypatch.setitem(sys.modules, "sky", None)
    answer = await SkySender()(Call("GET", "/status"))
    assert answer.status == 501
    failed = SkyPilot().listed(answer, "echo2-")
    assert isinstance(failed, Failed)
    assert failed.trouble is Trouble.REFUSED
    assert "pip install skypilot" in failed.words


class Recorded(types.ModuleType):
    """The documented part of `sky`: each call returns a request that `get` turns into its result."""

    def __init__(self):
        super().__init__("sky")
        self.launched = []
        self.clusters = [{"name": LABEL, "status": types.SimpleNamespace(value="UP"), "launched_at": 1000}]

    def get(self, request):
        return request()

    def list_accelerators(self, *, gpus_only, name_filter):
        one = types.SimpleNamespace(
            cloud="AWS", instance_type="g5", accelerator_name="A10G", accelerator_count=1, device_memory=24, price=1.0, region="us"
        )
        return lambda: {"A10G": [one]} if gpus_only and name_filter == "A10G" else {}

    def status(self, cluster_names=None):
        return lambda: [one for one in self.clusters if cluster_names is None or one["name"] in cluster_names]

    def down(self, name):
        def gone():
            if name != LABEL:
                raise type("ClusterDoesNotExist", (ValueError,), {})(name)

        return gone

    def Task(self, **fields):
        return types.SimpleNamespace(**fields, set_resources=lambda resources: None)

    def Resources(self, **fields):
        return fields

    def launch(self, task, **options):
        self.launched.append((task.run, task.envs, options))


async def test_sky_is_called_as_its_documents_say(monkeypatch):
    sky = Recorded()
    monkeypatch.setitem(sys.modules, "sky", sky)
    feed, send = SkyPilot(), SkySender()

    async def ask(call: Call) -> Answer:
        return await send(call)

    found = feed.offers(await ask(feed.search(Need(cards=("A10G",)))), Need(), now=0.0)
    assert isinstance(found, Offers)
    assert [(one.id, one.uusd_per_hour) for one in found.offers] == [("aws/g5/A10G:1", 1_000_000)]
    made = feed.created(await ask(feed.create(RentalOffer("skypilot", "x", "A10G", 1, tier="aws"), SPEC, LABEL)), LABEL)
    assert made == Handle(LABEL, LABEL, Shown.STARTING)
    assert sky.launched == [(SPEC.script, dict(SPEC.env), {"cluster_name": LABEL, "idle_minutes_to_autostop": 10, "down": True})]
    assert feed.got(await ask(feed.get(LABEL))) == Handle(LABEL, LABEL, Shown.RUNNING, None, 1000.0)
    assert feed.destroyed(await ask(feed.destroy(LABEL))) is None
    assert feed.destroyed(await ask(feed.destroy("other"))) is None  # not there is as good as gone


async def test_calls_of_sky_that_hang_are_few_and_hold_up_nothing_else(monkeypatch):
    sky, well = Recorded(), threading.Event()
    monkeypatch.setattr(sky, "get", lambda request: well.wait() and request())
    monkeypatch.setitem(sys.modules, "sky", sky)
    provider = RemoteProvider(SkyPilot(), SkySender(), call_s=0.02, look_s=0.02)
    for _ in range(MOST_CALLS):
        failed = await provider.destroy(LABEL)
        assert isinstance(failed, Failed)
        assert failed.words.startswith("no answer")
    refused = await provider.destroy(LABEL)
    assert isinstance(refused, Failed)
    assert "have not returned" in refused.words
    assert await asyncio.to_thread(lambda: 5) == 5
    well.set()
    while await provider.destroy(LABEL) is not None:
        await asyncio.sleep(0.01)
