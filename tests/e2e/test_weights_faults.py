"""Faults of weight dissemination in the whole product, and where each named fault is proved.

Real coordinator, learner, encoder, seeder and workers as processes; what dies is killed with SIGKILL, what hangs is stopped with SIGSTOP.
After each fault all live workers end on the newest digest, bit for bit on their disks, and before that serve only versions that were published.

| fault | parts (tests/integration/..., tests/unit/...) | whole product (here, unless named) |
|---|---|---|
| peer dies mid-piece | p2p/bulk/test_processes.py::test_a_peer_killed_in_the_middle_of_a_piece_delays_the_others_only | test_churn_with_a_version_each_second |
| killed peer returns | p2p/faults/test_suspended.py::test_a_killed_peer_comes_back_and_fetches_what_is_missing | test_a_worker_killed_in_a_fetch_resumes |
| corrupted pieces | p2p/bulk/test_hostile_peers.py::test_wrong_bytes_are_not_stored_and_blamed_on_whoever_sent_them | attack/test_lying_peer.py |
| stale pieces | p2p/faults/test_stale.py: old version, other job, old bytes under new names | |
| endless pieces | p2p/bulk/test_hostile_peers.py::test_pieces_beyond_the_row_and_without_an_end_are_refused; p2p/faults/test_stale.py: drop by drop, junk, unknown frames | |
| seeder dies after 30 % and returns | p2p/bulk/test_processes.py::test_a_seeder_killed_after_a_third_returns_and_all_complete | test_the_seeder_dies_after_a_third |
| seeder, peer suspended | p2p/faults/test_suspended.py | test_processes_that_stand_still |
| coordinator dies mid-dissemination | driving/test_seeding.py::test_the_edges_of_the_newest_versions_are_offered_and_again_after_a_restart | test_the_coordinator_dies_after_a_third |
| partition and heal | p2p/faults/test_partition.py | test_a_worker_cut_off_from_everybody_comes_back |
| disk full | p2p/faults/test_full_disk.py; p2p/faults/test_worker_disk.py; unit/p2p/test_store_and_snapshot.py::test_a_full_disk_is_told_and_leaves_nothing | test_a_full_disk_is_told_and_passes |
| worker killed during apply | p2p/faults/test_apply.py::test_killed_while_it_writes | test_a_worker_killed_while_it_applies |
| failed apply: damaged base | p2p/faults/test_apply.py | test_a_base_damaged_on_disk |
| failed apply: wrong result digest | worker_node/test_paths.py::test_after_a_failed_apply_another_path_is_asked_for; properties/test_weights_fuzz.py::test_a_version_of_other_bytes_is_never_there | |
| clock jump | p2p/faults/test_clock.py; worker_node/test_client.py::test_a_clock_that_jumps_is_corrected_once_and_the_call_repeated | attack/test_clocks.py |
| libp2p blocked, missing, killed | p2p/control/test_fallback.py | test_control_plane.py |
| wrong certificate | p2p/bulk/test_hostile_peers.py::test_a_listener_with_another_certificate_gets_no_ticket; worker_node/test_client.py | |
| ticket replayed, stolen, expired | p2p/bulk/test_hostile_peers.py::test_a_replayed_proof_is_refused; p2p/bulk/test_hostile_peers.py::test_other_tickets_are_refused_in_words; p2p/bulk/test_hostile_peers.py::test_an_open_connection_ends_with_its_ticket_unless_it_is_renewed | |
| away for 30 versions | worker_node/test_paths.py::test_a_worker_that_was_away_comes_back_over_the_chain | test_away_for_thirty_versions |
| bombs, lying sizes, unsorted positions | unit/p2p/test_codec_hostile.py::test_hostile_edges_are_refused_in_words; unit/p2p/test_weights_file.py::test_bombs_are_measured_before_they_are_opened | |
| wrong base | unit/p2p/test_paths.py::test_a_wrong_base_is_noticed_and_leaves_what_was_there | |
| swapped shards | unit/p2p/test_codec_hostile.py; properties/test_weights_fuzz.py::test_swapped_shards_of_one_size_are_refused_by_the_digest | |
| path-like names | unit/p2p/test_manifest.py::test_hostile_text_is_refused_in_words; unit/p2p/test_store_and_snapshot.py::test_only_digests_become_paths | |
| forged or reordered batch | unit/p2p/test_batches.py::test_a_forged_batch_is_refused; unit/p2p/test_batches.py::test_reordered_batches_are_refused_and_change_nothing; p2p/bulk/test_hostile_peers.py::test_batches_that_were_not_asked_for_or_are_forged_end_the_connection | |
| damaged bytes of any kind | properties/test_weights_fuzz.py, properties/test_weights_fuzz_words.py (10,000 each with --long); p2p/faults/test_fuzz_bytes.py over live connections | |
"""

from __future__ import annotations

import json
import random
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from coordinator.commands.connection import find
from coordinator.rest_client import RestClient
from p2p.adapters.piece_store import PieceStore
from p2p.adapters.snapshot_dir import digest_of
from p2p.domain import lineage
from p2p.domain.lineage import Way
from p2p.domain.manifest import Manifest
from tests.bench.swarm.network import Network, inside, links_of, why_not
from tests.e2e.cluster import Cluster, scripted_job
from tests.e2e.test_crashes import check_end
from tests.models.tiny import make_tiny_model

LOOPBACK = {"ECHO2_PEER_NETWORKS": '["127.0.0.0/8"]', "ECHO2_SEEDER_PORT": "0"}
SEEDER = "p2p.adapters.bulk.seeder"
MANY = 100_000  # steps: more than any of these jobs makes


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2 MB instead of 30 kB: a version of it takes a while over a slow link."""
    return make_tiny_model(tmp_path_factory.mktemp("model") / "wide", width=256)


def test_the_table_names_what_there_is() -> None:
    """Each file in the table above is there, and has the test that is named."""
    roots = [Path(__file__).parents[1] / part for part in ("", "integration", "e2e")]
    own = Path(__file__).read_text()
    rows = [line for line in (__doc__ or "").splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    for file, name in re.findall(r"([\w/]+\.py)(?:::(\w+))?", " ".join(rows)):
        found = [root / file for root in roots if (root / file).is_file()]
        assert found, file
        assert not name or f"def {name}(" in found[0].read_text(), f"{file}::{name}"
    for row in rows:
        for name in re.findall(r"(?<![:\w])test_\w+(?!\w*\.py)\b", row.rpartition("|")[0].rpartition("|")[2]):
            assert f"def {name}(" in own, name


class Fleet(Cluster):
    """A cluster with one job, and what can be seen of its versions."""

    job_id = ""

    def begin(self, model: Path, names: tuple[str, ...], **changes: Any) -> None:
        """Start everything."""
        self.start_coordinator()
        self.job_id = self.submit(scripted_job(model, **{"budget": {"steps": MANY}, **changes}))
        for name in names:
            self.start_worker(name)

    def newest(self) -> tuple[int, str]:
        """Number and digest of the newest published version."""
        found = self.rows(
            "SELECT version, digest FROM publications WHERE job_id = ? AND state = 'published' ORDER BY version DESC LIMIT 1",
            self.job_id,
        )
        return (int(found[0][0]), str(found[0][1])) if found else (-1, "")

    def holders(self, digest: str) -> dict[str, int]:
        """Names of the workers that confirmed a version, and the bytes that it cost each."""
        found = self.rows(
            "SELECT w.name, h.fetched_bytes FROM holdings h JOIN workers w ON w.id = h.worker_id WHERE h.job_id = ? AND h.digest = ?",
            self.job_id,
            digest,
        )
        return {str(name): int(count) for name, count in found}

    def until_version(self, number: int, *, within_s: float = 120) -> None:
        self.until(lambda: self.newest()[0] >= number, f"version {number} is published", within_s=within_s)

    def pause(self) -> None:
        """No more versions: what is under way is finished, which may still publish one."""
        self.until(lambda: self._post("pause") or True, "the coordinator takes the order")
        self.until(lambda: self.job(self.job_id)["state"] == "paused", "it pauses")
        before = None
        while before != (before := self.newest()):
            time.sleep(1.0)

    def resume(self) -> None:
        self.until(lambda: self._post("resume") or True, "the coordinator takes the order")

    def _post(self, order: str) -> None:
        self.run(lambda c: c.post(f"/jobs/{self.job_id}/{order}", {"reason": "the test says so"}))

    def all_on_newest(self, *names: str, within_s: float = 60) -> None:
        """Paused: each of these workers confirms the newest version, and its very bits lie on its disk."""
        number, digest = self.newest()
        self.until(lambda: set(names) <= set(self.holders(digest)), f"all are on version {number}", within_s=within_s)
        for name in names:
            (directory,) = self.versions_of(name).glob(f"[!.]*-{number}-{digest[:32]}")
            assert digest_of(directory) == digest

    def versions_of(self, name: str) -> Path:
        return self.folder / name / "weights" / "versions"

    def pieces_of(self, name: str) -> frozenset[str]:
        """The pieces in a worker's store."""
        return frozenset(PieceStore(self.folder / name / "weights" / "pieces").digests())

    def joins(self, name: str) -> int:
        """How often the worker joined, in all its lives."""
        return self.log(name).count('"joined"')

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def sound(self) -> None:
        """Nothing was made by a version that was not published; the audit agrees. The job ends here."""
        known = {digest for (digest,) in self.rows("SELECT digest FROM publications WHERE job_id = ?", self.job_id)}
        used = self.rows("SELECT digests FROM rollouts WHERE job_id = ? AND digests IS NOT NULL", self.job_id)
        assert used
        assert {digest for (text,) in used for digest in json.loads(text).values()} <= known
        assert {digest for (digest,) in self.rows("SELECT digest FROM holdings WHERE job_id = ?", self.job_id)} <= known
        self.run(lambda c: c.post(f"/jobs/{self.job_id}/cancel", {"reason": "seen enough"}))
        self.until(lambda: self.audit(self.job_id)["ok"], "the audit is sound", within_s=30)
        job = self.job(self.job_id)
        assert job["staleness"]["highest"] <= job["staleness"]["bound"]

    def seeder(self) -> psutil.Process | None:
        """The seeder's process."""
        assert self.coordinator is not None
        try:
            for process in psutil.Process(self.coordinator.pid).children(recursive=True):
                if any(SEEDER in part for part in process.cmdline()):
                    return process
        except psutil.NoSuchProcess:
            return None
        return None


def peer_options(*more: str) -> tuple[str, ...]:
    """A worker that serves others, on a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return ("--peer-port", str(probe.getsockname()[1]), *more)


# --- killed


@pytest.mark.long
@pytest.mark.parametrize("point", ["worker.assembling:1", "worker.assembling:3", "worker.assembled:1", "worker.assembled:3"])
def test_a_worker_killed_while_it_applies(point: str, tmp_path: Path, tiny_model: Path) -> None:
    """Before the first byte of a version's directory, and between the directory and its record: neither counts as stored."""
    with Fleet(tmp_path, variables=LOOPBACK) as fleet:
        fleet.start_coordinator()
        fleet.job_id = fleet.submit(scripted_job(tiny_model))
        fleet.start_worker("one", crash_at=point)
        fleet.start_worker("two")
        fleet.until(lambda: fleet.workers["one"].poll() == -signal.SIGKILL, f"the worker reaches {point}")
        held = {path.name for path in fleet.versions_of("one").glob("*.json")}
        assert not (held and point.endswith(":1")), "a version without a record of its own counts as stored"
        check_end(fleet, fleet.job_id)
        assert not [path for path in fleet.versions_of("one").iterdir() if path.name.endswith(".tmp")]


@pytest.mark.long
def test_a_worker_killed_in_a_fetch_resumes(tmp_path: Path, wide_model: Path) -> None:
    """Over a slow link: what was here at the kill is not asked for again."""
    with Fleet(tmp_path, variables=LOOPBACK) as fleet:
        fleet.begin(wide_model, ())
        fleet.until_version(0)
        _, digest = fleet.newest()
        fleet.start_worker("one", options=("--down-mbit", "2"))
        fleet.until(lambda: len(fleet.pieces_of("one")) >= 8, "some pieces are here")
        fleet.workers["one"].kill()
        fleet.workers["one"].wait()
        assert not list(fleet.versions_of("one").glob("*"))
        here = fleet.pieces_of("one")
        fleet.start_worker("one")
        fleet.until(lambda: "one" in fleet.holders(digest), "it is on version 0")
        [(text,)] = fleet.rows("SELECT manifest FROM publications WHERE job_id = ? AND digest = ?", fleet.job_id, digest)
        manifest = Manifest.from_json(text)
        needed = manifest.pieces([min(manifest.edges, key=lambda edge: edge.size)])
        missing = sum(piece.size for piece in needed if piece.digest not in here)
        assert fleet.holders(digest)["one"] <= missing < sum(piece.size for piece in needed)
        fleet.until_version(3)
        fleet.pause()
        fleet.all_on_newest("one")
        fleet.sound()


def slow_seed(fleet: Fleet, model: Path) -> None:
    """Two workers that have about a third of version 0 from a seeder with 3 Mbit/s."""
    fleet.begin(model, ())
    fleet.until_version(0)
    fleet.until(lambda: fleet.seeder() is not None, "the seeder runs")
    for name in ("one", "two"):
        fleet.start_worker(name, options=peer_options())
    (edge,) = fleet.rows("SELECT document FROM edges WHERE job_id = ? AND encoding = 'planes'", fleet.job_id)
    pieces = len(json.loads(edge[0])["edge"]["pieces"])
    fleet.until(lambda: len(fleet.pieces_of("one")) >= 0.3 * pieces, "a third is here")
    assert len(fleet.pieces_of("two")) < pieces, "the link is too fast for this test"
    assert not list(fleet.versions_of("one").glob("*.json"))


SLOW = {**LOOPBACK, "ECHO2_SEEDER_UP_MBIT": "3"}


@pytest.mark.long
def test_the_seeder_dies_after_a_third(tmp_path: Path, wide_model: Path) -> None:
    """The coordinator starts it again, on its port; the workers go on with what they have."""
    with Fleet(tmp_path, variables=SLOW) as fleet:
        slow_seed(fleet, wide_model)
        first = fleet.seeder()
        assert first is not None
        first.kill()
        fleet.until(lambda: (now := fleet.seeder()) is not None and now.pid != first.pid, "another seeder runs")
        fleet.until_version(3)
        fleet.pause()
        fleet.all_on_newest("one", "two")
        listened = [line for line in fleet.log("coordinator").splitlines() if "seeder_listens" in line]
        assert len(listened) >= 2
        assert len({port for line in listened for port in re.findall(r"port\W+(\d+)", line)}) == 1, listened
        fleet.sound()


@pytest.mark.long
def test_the_coordinator_dies_after_a_third(tmp_path: Path, wide_model: Path) -> None:
    """Seeder and learner die with it. The workers keep what they have, and finish when it is back."""
    with Fleet(tmp_path, variables=SLOW) as fleet:
        slow_seed(fleet, wide_model)
        assert fleet.coordinator is not None
        seeder = fleet.seeder()
        fleet.coordinator.kill()
        fleet.coordinator.wait()
        assert seeder is not None
        fleet.until(lambda: not seeder.is_running(), "the seeder ends with its coordinator", within_s=10)
        time.sleep(3.0)
        kept = fleet.pieces_of("one")
        fleet.start_coordinator()
        assert fleet.pieces_of("one") >= kept
        fleet.until_version(3)
        fleet.pause()
        fleet.all_on_newest("one", "two")
        fleet.sound()


# --- standing still, cut off


@pytest.mark.long
def test_processes_that_stand_still(tmp_path: Path, wide_model: Path) -> None:
    """The seeder for 15 s, then a worker for 15 s, while versions come out."""
    with Fleet(tmp_path, variables=LOOPBACK) as fleet:
        fleet.begin(wide_model, ())
        for name in ("one", "two"):
            fleet.start_worker(name, options=peer_options())
        fleet.until_version(2)
        seeder = fleet.seeder()
        assert seeder is not None
        for process in (seeder, psutil.Process(fleet.workers["two"].pid)):
            before = fleet.newest()[0]
            process.suspend()
            time.sleep(15.0)
            assert fleet.newest()[0] > before, "the job waited for it"
            if process.is_running():
                process.resume()
        fleet.pause()
        fleet.all_on_newest("one", "two")
        fleet.sound()


class NetFleet(Fleet):
    """Each process on a host of its own: the coordinator on 0, workers on 1 and 2."""

    def __init__(self, folder: Path, network: Network) -> None:
        networks = {"ECHO2_PEER_NETWORKS": '["10.77.0.0/24"]', "ECHO2_HOST": network.address(0)}
        super().__init__(folder, variables={**networks, "ECHO2_SEEDER_PORT": "0"})
        self._network = network
        self._hosts = {"coordinator": 0, "one": 1, "two": 2}

    def _spawn(self, command: list[str], name: str, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
        namespace = self._network.namespace(self._hosts[name])
        return super()._spawn(["ip", "netns", "exec", namespace, *command], name, variables)

    def run(self, action: Callable[[RestClient], Any]) -> Any:
        return inside(self._network.namespace(0), lambda: find(None, None, self.home).run(action))

    def submit(self, job: dict[str, Any]) -> str:
        return inside(self._network.namespace(0), lambda: super(NetFleet, self).submit(job))

    def cut_off(self, name: str) -> None:
        self._link(name, "down")

    def reconnect(self, name: str) -> None:
        self._link(name, "up")
        host = self._hosts[name]
        route = ("route", "replace", f"{self._network.address(host)}/32", "dev", f"v{host}")
        subprocess.run(("ip", "-n", self._network.hub, *route), check=True)

    def _link(self, name: str, state: str) -> None:
        subprocess.run(("ip", "-n", self._network.hub, "link", "set", f"v{self._hosts[name]}", state), check=True)


@pytest.mark.long
@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
def test_a_worker_cut_off_from_everybody_comes_back(tmp_path: Path, wide_model: Path) -> None:
    """20 s without a packet, in the middle of a fetch; the job goes on with the other one, and both end alike."""
    with Network(links_of((20.0, 20.0, 20.0))) as network, NetFleet(tmp_path, network) as fleet:
        fleet.begin(wide_model, ())
        for number, name in enumerate(("one", "two"), 1):
            port = ("--peer-host", network.address(number), "--peer-port", "7801")
            fleet.start_worker(name, options=port)
        fleet.until_version(2)
        fleet.until(lambda: "two" in fleet.holders(fleet.newest()[1]), "both take part")
        fleet.cut_off("two")
        begun = fleet.newest()[0]
        time.sleep(20.0)
        assert fleet.newest()[0] > begun, "the job waited for the one that was cut off"
        fleet.reconnect("two")
        fleet.pause()
        fleet.all_on_newest("one", "two", within_s=90)
        fleet.sound()


# --- disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB for the worker `one`."""
    place = tmp_path / "one"
    place.mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "echo2-test", str(place))
    if (done := subprocess.run(mount, capture_output=True, text=True, check=False)).returncode:
        pytest.skip(f"no file system can be mounted here (not root?): {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(ballast: Path) -> None:
    """Take what room there is."""
    with ballast.open("wb", buffering=0) as out, suppress(OSError):
        while out.write(bytes(4096)):
            continue


@pytest.mark.long
def test_a_full_disk_is_told_and_passes(tmp_path: Path, tiny_model: Path, small_disk: Path) -> None:
    """The worker goes on with the version that it has, says in one line why it has no newer one, and takes it when there is room."""
    with Fleet(tmp_path, variables=LOOPBACK) as fleet:
        fleet.begin(tiny_model, ("one",), staleness={"max": 4})
        fleet.until_version(1)
        fleet.until(lambda: "one" in fleet.holders(fleet.newest()[1]), "it takes part")
        ballast = small_disk / "ballast"
        fill(ballast)

        def refusals() -> list[str]:
            return [line for line in fleet.log("one").splitlines() if '"not fetched"' in line]

        fleet.until(refusals, "it says so")
        assert "No space left on device" in json.loads(refusals()[0])["reason"]
        assert fleet.workers["one"].poll() is None

        def tells_the_operator() -> bool:
            (worker,) = fleet.run(lambda c: c.get("/workers"))["workers"]
            return "No space left on device" in fleet.run(lambda c: c.get(f"/workers/{worker['id']}"))["activity"]

        fleet.until(tells_the_operator, "the operator sees why")
        (kept, *_) = fleet.versions_of("one").glob("*.json")
        fleet.workers["one"].kill()
        fleet.workers["one"].wait()
        seen = fleet.log("one").count('"joined"')
        fleet.start_worker("one")
        fleet.until(lambda: fleet.log("one").count('"joined"') > seen, "it comes back on a full disk")
        assert kept.exists(), "the version that it had is kept"
        ballast.unlink()
        stuck = fleet.newest()[0]
        fleet.until_version(stuck + 2)
        fleet.pause()
        fleet.all_on_newest("one")
        fleet.sound()


@pytest.mark.long
def test_a_base_damaged_on_disk(tmp_path: Path, tiny_model: Path) -> None:
    """The next delta leads to other bits: refused by the result's digest, told, and another path is taken. The worker lives on."""
    with Fleet(tmp_path, variables=LOOPBACK) as fleet:
        fleet.begin(tiny_model, ("one", "two"))
        fleet.until_version(2)
        fleet.pause()
        fleet.all_on_newest("one", "two")
        number, digest = fleet.newest()
        for directory in fleet.versions_of("one").glob(f"[!.]*-{number}-{digest[:32]}"):
            weights = directory / "model.safetensors"
            data = bytearray(weights.read_bytes())
            data[-5] ^= 0x40
            weights.write_bytes(data)
        fleet.resume()
        fleet.until_version(number + 3)
        fleet.pause()
        fleet.all_on_newest("one", "two")
        assert "the result has digest" in fleet.log("one")
        assert "the result has digest" not in fleet.log("two")
        assert fleet.rows("SELECT count(*) FROM worker_sessions") == [(2,)], "nobody had to join anew"
        fleet.sound()


# --- coming and going


TURNS = 60  # kills and returns
VERSIONS = 10  # that come out meanwhile
PATIENCE_S = 600.0  # of a machine on which everything takes twenty times as long


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1])
def test_churn_with_a_version_each_second(seed: int, tmp_path: Path, tiny_model: Path) -> None:
    """Six workers, one killed or brought back twice a second, in whatever state it is. Everyone who is alive at the end is within S of the learner."""
    draw = random.Random(seed)
    names = tuple(f"w{number}" for number in range(6))
    with Fleet(tmp_path, variables=LOOPBACK) as fleet:
        fleet.begin(tiny_model, (), staleness={"max": 2, "publish_every": 1})
        bound = int(fleet.job(fleet.job_id)["staleness"]["bound"])
        options = {name: peer_options("--up-mbit", "5", "--down-mbit", "5", "--tokens-per-s", "60") for name in names}
        for name in names:
            fleet.start_worker(name, options=options[name])
        fleet.until_version(2, within_s=PATIENCE_S)
        churn(fleet, options, draw)
        alive = tuple(name for name in names if fleet.workers[name].poll() is None)
        fleet.until(
            lambda: all(behind(fleet, name) <= bound for name in alive), "everyone alive is within S", within_s=PATIENCE_S / 4
        )
        fleet.pause()
        fleet.all_on_newest(*alive, within_s=PATIENCE_S / 4)
        fleet.sound()


def churn(fleet: Fleet, options: Mapping[str, tuple[str, ...]], draw: random.Random) -> None:
    """Kill and bring back until that happened TURNS times and VERSIONS came out. Two others that joined are left at each kill: somebody works."""
    first, ends_at = fleet.newest()[0], time.monotonic() + PATIENCE_S
    sessions = dict.fromkeys(options, 0)  # that ended
    kills = returns = 0
    while kills + returns < TURNS or fleet.newest()[0] < first + VERSIONS:
        assert time.monotonic() < ends_at, f"{kills} kills, {returns} returns, versions {first} to {fleet.newest()[0]}"
        time.sleep(draw.uniform(0.3, 0.7))
        name = draw.choice(list(options))
        joined = {one for one in options if fleet.workers[one].poll() is None and fleet.joins(one) > sessions[one]}
        if fleet.workers[name].poll() is not None:
            fleet.start_worker(name, options=options[name])
            returns += 1
        elif len(joined - {name}) >= 2:
            fleet.workers[name].kill()
            fleet.workers[name].wait()
            sessions[name] = fleet.joins(name)
            kills += 1
    assert kills >= TURNS / 3
    assert returns >= TURNS / 3


def behind(fleet: Fleet, name: str) -> int:
    """How many versions the newest that a worker confirmed is behind the newest that there is."""
    newest = fleet.newest()[0]
    query = "SELECT max(h.version) FROM holdings h JOIN workers w ON w.id = h.worker_id WHERE w.name = ? AND h.job_id = ?"
    ((held,),) = fleet.rows(query, name, fleet.job_id)
    return newest - (held if held is not None else -1000)


@pytest.mark.long
def test_away_for_thirty_versions(tmp_path: Path, tiny_model: Path) -> None:
    """It comes back over squashed edges: the bytes are those of the cheapest path in the lineage, less than the chain of singles."""
    with Fleet(tmp_path, variables=LOOPBACK) as fleet:
        fleet.begin(tiny_model, ("one", "two"), algorithm={"learning_rate": 1e-4})
        fleet.until_version(2)
        fleet.pause()
        fleet.all_on_newest("one", "two")
        left_at, held = fleet.newest()
        fleet.workers["two"].send_signal(signal.SIGTERM)
        fleet.workers["two"].wait(30)
        fleet.resume()
        fleet.until_version(left_at + 30, within_s=240)
        fleet.pause()
        number, digest = fleet.newest()
        ways = [Way(*row) for row in fleet.rows(WAYS, fleet.job_id)]
        cheapest = lineage.path(ways, digest, held=frozenset({held}))
        singles = {way.digest: way for way in ways if way.base_version is not None and way.version - way.base_version == 1}
        chain = sum(way.nbytes for way in singles.values() if left_at < way.version <= number)
        fleet.start_worker("two")
        fleet.all_on_newest("one", "two")
        assert fleet.holders(digest)["two"] == lineage.cost(cheapest) < chain
        assert len(cheapest) < number - left_at
        fleet.resume()
        fleet.until_version(number + 2)
        fleet.sound()


WAYS = "SELECT id, digest, version, encoding, base_digest, base_version, nbytes FROM edges WHERE job_id = ?"
