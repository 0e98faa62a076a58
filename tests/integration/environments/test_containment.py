"""Hostile and broken reward code, really run: it is contained, it never becomes a score, and the plane goes on."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import ModuleType

import pytest

from coordinator.environments.jail import JailLimits
from coordinator.environments.plane import TEXT_CHARS, TEXT_CHARS_PER_TOKEN, JailedDataPlane
from coordinator.service.ports import Graded

# A reward function that does what the completion says: the tests send the name of an action.
CODE = """
import os, sys, time

def ok(): pass

def hang():
    while True: time.sleep(60)

def spin():
    while True: pass

def stubborn():
    import signal
    for number in range(1, 65):
        try: signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError): pass
    while True: pass

def fork():
    while True: os.fork()

def spawn():
    import subprocess
    subprocess.run(["/bin/true"])

def threads():
    import threading
    while True: threading.Thread(target=time.sleep, args=(60,)).start()

def allocate():
    kept = []
    while True: kept.append(bytes(64 << 20))

def recurse(): return recurse()

def die(): os._exit(0)

def leave(): sys.exit(0)

def crash():
    import ctypes
    ctypes.string_at(0)

def write_outside(): open(OUTSIDE + "/stolen", "w")

def read_outside(): open(OUTSIDE + "/secret").read()

def read_coordinator(): open(f"/proc/{os.getppid()}/environ").read()

def list_outside(): os.listdir(OUTSIDE)

def write_much():
    with open("big", "wb") as file:
        while True: file.write(bytes(1 << 20))

def write_many():
    number = 0
    while True:
        number += 1
        with open(f"file{number}", "wb") as file: file.write(bytes(1 << 20))

def inet():
    import socket
    socket.create_connection(("127.0.0.1", PORT), timeout=1)

def inet6():
    import socket
    socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)

def unix():
    import socket
    socket.socket(socket.AF_UNIX)

def unix_pair():
    import socket
    ours, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    ours.sendto(b"x", "/run/anything")

def kill_parent(): os.kill(os.getppid(), 9)

def kill_all(): os.kill(-1, 9)

def trace():
    import ctypes
    if ctypes.CDLL(None, use_errno=True).ptrace(16, os.getppid(), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "ptrace")

def mount():
    import ctypes
    if ctypes.CDLL(None, use_errno=True).mount(b"none", b"/", b"tmpfs", 0, None) != 0:
        raise OSError(ctypes.get_errno(), "mount")

def become_root(): os.setuid(0)

FORGED = b'{"id":"x","graded":[["scored",999.0,"forged",""]],"metrics":{}}'
FRAME = len(FORGED).to_bytes(4, "little") + FORGED

def print_forged():
    for stream in (sys.stdout, sys.stderr, sys.__stdout__):
        print(FORGED.decode(), file=stream, flush=True)
    for number in (0, 1, 2):
        try: os.write(number, FRAME)
        except OSError: pass

def write_forged():
    for number in range(3, 64):
        try: os.write(number, FRAME)
        except OSError: pass

def stop_itself(): os.kill(os.getpid(), 19)

def close_link():
    for number in range(3, 64):
        try: os.close(number)
        except OSError: pass
    time.sleep(60)

def oversized():
    for number in range(3, 64):
        try: os.write(number, b"\\xff\\xff\\xff\\x7f")
        except OSError: pass
    time.sleep(60)

def nest():
    sys.setrecursionlimit(10**9)
    deep = []
    for _ in range(10**6): deep = [deep]
    repr(deep)

def tiny_writes():
    for _ in range(10**6): os.write(1, b"x")

def refused(*tries):
    count = 0
    for one in tries:
        try: one()
        except PermissionError: count += 1
    raise RuntimeError("all refused" if count == len(tries) else f"{count} of {len(tries)} refused")

def prctl(option):
    import ctypes
    if ctypes.CDLL(None, use_errno=True).prctl(option, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")

def signal_by_files():
    import fcntl, socket, struct
    readable, ours = os.pipe()[0], socket.socketpair()[0]
    refused(
        lambda: fcntl.fcntl(readable, fcntl.F_SETOWN, os.getppid()),
        lambda: fcntl.fcntl(readable, 10, 9),
        lambda: fcntl.fcntl(readable, 15, struct.pack("ii", 1, os.getppid())),
        lambda: fcntl.ioctl(ours, 0x8901, struct.pack("i", os.getppid())),
        lambda: fcntl.ioctl(ours, 0x8902, struct.pack("i", os.getppid())),
    )

def outlive(): prctl(1)

def fill_memory_files():
    places = [place for place in ("/dev/shm", "/tmp", "/var/tmp") if os.path.isdir(place)]
    refused(*(lambda place=place: open(place + "/echo2-stolen", "w") for place in places))

def serving():
    frame = sys._getframe()
    while not {"link", "request"} <= frame.f_locals.keys(): frame = frame.f_back
    return frame.f_locals

def forge(text):
    here = serving()
    here["link"].send({"id": here["request"]["id"], "graded": [["scored", 1.0, text, ""]], "metrics": {}})
    time.sleep(60)

def forge_long(): forge("x" * (24 << 20))

def forge_longish(): forge("x" * 500_000)

def surrogates(): raise ValueError("half \\ud800 and \\x00")

def look_around():
    heavy = [name for name in ("torch", "sqlalchemy", "aiohttp", "pydantic", "transformers") if name in sys.modules]
    raise RuntimeError(f"heavy={heavy} secret={'ECHO2_SECRET' in os.environ} names={sorted(os.environ)} cwd={os.listdir('.')} "
                       f"fds={[n for n in range(64) if is_open(n)]} stdin={os.read(0, 1)} umask={os.umask(0)} session={os.getsid(0) == os.getpid()}")

def is_open(number):
    try: os.fstat(number)
    except OSError: return False
    return True

def scratch():
    with open("note", "w") as file: file.write("fine")
    assert open("note").read() == "fine"

def uses_libraries():
    import asyncio, decimal, json, re, tempfile, numpy
    assert numpy.arange(3).sum() == 3
    asyncio.run(asyncio.sleep(0))
    tempfile.TemporaryFile(dir=".").close()

def reward(completions, **_):
    for action in completions:
        globals()[action]()
    return [float(os.getpid()) if action == "ok" else 1.0 for action in completions]
"""

Act = Callable[[str], Awaitable[Graded]]


# The layer of the jail that refuses an action, where a weaker host may lack it.
NEEDS = {
    "landlock": ["write_outside", "read_outside", "list_outside", "fill_memory_files"],
    "scratch_bounded": ["write_many"],
    "seccomp": [
        *("fork", "spawn", "inet", "inet6", "unix", "unix_pair", "kill_parent", "kill_all", "trace"),
        *("signal_by_files", "outlive"),
    ],
}


@pytest.fixture
def limit_s() -> float:
    return 20.0


@pytest.fixture
async def plane(
    tmp_path: Path, made: ModuleType, monkeypatch: pytest.MonkeyPatch, limit_s: float
) -> AsyncIterator[JailedDataPlane]:
    monkeypatch.setenv("ECHO2_SECRET", "token")
    outside = tmp_path / "outside"
    outside.mkdir()
    outside.chmod(0o777)
    (outside / "secret").write_text("key")
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    code = CODE + f"\nOUTSIDE = {str(outside)!r}\nPORT = {port}\n"
    limits = JailLimits(address_space_bytes=1 << 30, file_bytes=4 << 20, scratch_bytes=16 << 20)
    made_plane = made.reward_plane(tmp_path, code, environment={"grade_timeout_s": limit_s}, limits=limits)
    await made_plane.start()
    yield made_plane
    await made_plane.close()
    server.close()
    await server.wait_closed()
    assert not (outside / "stolen").exists()


@pytest.fixture
def act(plane: JailedDataPlane, made: ModuleType) -> Act:
    async def run(action: str) -> Graded:
        (graded,) = await plane.grade("train", 0, [made.ids_of(action)])
        assert graded.text == action
        return graded

    return run


@pytest.mark.parametrize("limit_s", [2.0])
@pytest.mark.parametrize("action", ["hang", "spin", "stubborn", "stop_itself"])
async def test_what_never_ends_is_killed_and_timed_out(act: Act, action: str) -> None:
    """Within its limit (and the time a new child needs), even when it ignores every signal."""
    began = time.monotonic()
    graded = await act(action)
    assert (graded.outcome, graded.reward) == ("timeout", None)
    assert time.monotonic() - began < 15
    assert (await act("ok")).outcome == "scored"


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ("fork", "PermissionError"),
        ("spawn", "PermissionError"),
        ("allocate", "MemoryError"),
        ("recurse", "RecursionError"),
        ("leave", "SystemExit"),
        ("die", "exit code 0"),
        ("crash", "SIGSEGV"),
        ("write_outside", "PermissionError"),
        ("read_outside", "PermissionError"),
        ("read_coordinator", "PermissionError"),
        ("list_outside", "PermissionError"),
        ("write_many", "No space left on device"),
        ("inet", "PermissionError"),
        ("inet6", "PermissionError"),
        ("unix", "PermissionError"),
        ("unix_pair", "PermissionError"),
        ("kill_parent", "PermissionError"),
        ("kill_all", "PermissionError"),
        ("trace", "PermissionError"),
        ("mount", "PermissionError"),
        ("become_root", "Error"),
        ("write_forged", "id"),
        ("oversized", "declares 2147483647 bytes, above the limit"),
        ("forge_long", "above the limit"),
        ("nest", "SIGSEGV"),
        ("signal_by_files", "all refused"),
        ("outlive", "PermissionError"),
        ("fill_memory_files", "all refused"),
    ],
)
async def test_what_breaks_out_or_breaks_down_fails_in_words(act: Act, plane: JailedDataPlane, action: str, words: str) -> None:
    """Never a score; and the next grading is served."""
    lacking = [layer for layer, actions in NEEDS.items() if action in actions and not getattr(plane.jail, layer)]
    if lacking:
        pytest.skip(f"this host lacks {lacking[0]}: {plane.jail.missing}")
    graded = await act(action)
    assert (graded.outcome, graded.reward) == ("failed", None), graded.detail
    assert words in graded.detail
    assert (await act("ok")).outcome == "scored"


@pytest.mark.long
@pytest.mark.parametrize("limit_s", [2.0])
async def test_a_child_that_closes_its_own_line_is_no_score(act: Act) -> None:
    """Whether the parent sees it at once or only by the limit is the kernel's business: another thread waits at that socket."""
    graded = await act("close_link")
    assert graded.outcome in ("failed", "timeout")
    assert graded.reward is None
    assert (await act("ok")).outcome == "scored"


@pytest.mark.parametrize("action", ["threads", "write_much"])
async def test_what_exhausts_a_limit_is_no_score(act: Act, action: str) -> None:
    """A thread bomb and an endless file, by whichever limit comes first."""
    graded = await act(action)
    assert graded.outcome in ("failed", "timeout")
    assert graded.reward is None
    assert (await act("ok")).outcome == "scored"


async def test_printed_results_are_not_results(act: Act) -> None:
    """The link is not a standard stream."""
    assert (await act("print_forged")).reward == 1.0
    assert (await act("ok")).reward != 999.0


async def test_a_flood_of_tiny_writes_goes_nowhere(act: Act) -> None:
    assert (await act("tiny_writes")).reward == 1.0


async def test_words_that_no_database_holds_are_made_storable(act: Act) -> None:
    """Half a surrogate pair and NUL are replaced, not passed on."""
    graded = await act("surrogates")
    assert graded.outcome == "failed"
    assert "half ? and \ufffd" in graded.detail


async def test_a_forged_text_is_cut_to_what_so_many_tokens_could_say(plane: JailedDataPlane, made: ModuleType) -> None:
    """It would be stored with the rollout, for good."""
    ids = made.ids_of("forge_longish")
    (graded,) = await plane.grade("train", 0, [ids])
    assert graded.outcome == "scored"
    assert len(graded.text) <= TEXT_CHARS + TEXT_CHARS_PER_TOKEN * len(ids)


async def test_a_child_holds_nothing_of_the_coordinator(act: Act) -> None:
    """No heavy imports, no environment, no open files but the link, no terminal, its own session."""
    detail = (await act("look_around")).detail
    assert "heavy=[]" in detail
    assert "secret=False" in detail
    assert "cwd=[]" in detail
    assert "stdin=b''" in detail
    assert f"umask={0o077}" in detail
    assert "session=True" in detail
    fds = detail.split("fds=[")[1].split("]")[0].split(", ")
    assert fds[:3] == ["0", "1", "2"]
    assert len(fds) <= 5  # and the link, and the interpreter's source of randomness


@pytest.mark.parametrize("action", ["scratch", "uses_libraries"])
async def test_honest_code_finds_what_it_needs(act: Act, action: str) -> None:
    """A scratch directory, the standard library, installed packages, an event loop."""
    graded = await act(action)
    assert graded.reward == 1.0, graded.detail


async def test_a_failure_keeps_the_child_and_a_hard_one_replaces_it(act: Act, plane: JailedDataPlane) -> None:
    """An ordinary exception costs no restart; memory, exit and time do."""
    first = (await act("ok")).reward
    await act("unix")
    assert (await act("ok")).reward == first
    assert plane.restarts == 0
    await act("leave")
    assert (await act("ok")).reward != first
    assert plane.restarts == 1


async def test_cpu_time_is_bounded_apart_from_wall_time(tmp_path: Path, made: ModuleType) -> None:
    """The kernel ends the child; the outcome says so."""
    plane = made.reward_plane(tmp_path, CODE, environment={"grade_timeout_s": 60}, limits=JailLimits(cpu_s=0.2))
    await plane.start()
    (graded,) = await plane.grade("train", 0, [made.ids_of("spin")])
    await plane.close()
    assert graded.outcome == "timeout"
    assert "CPU" in graded.detail


async def test_every_layer_this_host_offers_is_in_force(plane: JailedDataPlane) -> None:
    """And what is missing is named."""
    jail = plane.jail
    assert jail.confines_author_code
    assert jail.no_new_privs
    assert {"AS", "FSIZE", "NOFILE", "CORE"} <= set(jail.rlimits)
    layers = [
        jail.network,
        jail.seccomp and jail.sockets_denied,
        jail.scratch_bounded,
        jail.landlock > 0,
        jail.capabilities_dropped,
    ]
    assert all(layers) or jail.missing, jail


async def test_children_end_when_the_coordinator_is_killed(tmp_path: Path, made: ModuleType) -> None:
    """Kill -9, in the middle of a grading that ignores every signal."""
    made.reward_plane(tmp_path, CODE)  # writes the files
    script = textwrap.dedent(
        f"""
        import asyncio
        from pathlib import Path
        from coordinator.environments.plane import DataPlaneSpec, JailedDataPlane
        from coordinator.wire.environment import EnvironmentConfig

        async def main():
            here = Path({str(tmp_path)!r})
            config = EnvironmentConfig(type="python:rewards.py:reward")
            spec = DataPlaneSpec(config, 0, here / "model", here / "train.jsonl", None, here / "rewards.py")
            plane = JailedDataPlane(spec, processes=1)
            await plane.start()
            (ok,) = await plane.grade("train", 0, [{made.ids_of("ok")!r}])
            print(int(ok.reward), flush=True)
            await plane.grade("train", 0, [{made.ids_of("stubborn")!r}])

        asyncio.run(main())
        """
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=subprocess.PIPE)
    assert process.stdout is not None
    child = int(await process.stdout.readline())
    await asyncio.sleep(0.3)
    process.kill()
    await process.communicate()
    for _ in range(250):
        if not _runs(child):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"child {child} outlives its coordinator")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_closing_ends_the_children_and_leaves_no_files(plane: JailedDataPlane, act: Act) -> None:
    """Idempotent; a closed plane refuses in words."""
    pid = int((await act("ok")).reward or 0)
    scratch = Path(f"/proc/{pid}/cwd").readlink()
    await plane.close()
    await plane.close()
    assert not _runs(pid)
    assert not scratch.exists()
    assert "closed" in (await plane.grade("train", 0, [[5]]))[0].detail
