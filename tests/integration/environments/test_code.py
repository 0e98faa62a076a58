"""Programs that a model wrote, really run: each in a jail of its own, judged by what it prints."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType

import pytest

from coordinator.environments.base import EnvironmentBroken
from coordinator.environments.jail import JailLimits
from coordinator.environments.plane import JailedDataPlane
from coordinator.environments.programs import Programs

TESTS = [{"input": "1 2\n", "output": "3"}, {"input": "5 7\n", "output": "12 \n"}]
ADD = "a, b = map(int, input().split())\nprint(a + b)\n"
LIMITS = JailLimits(address_space_bytes=1 << 30)


async def ran(program: str, *, limit_s: float = 5.0) -> tuple[int, str]:
    tests = [(test["input"], test["output"]) for test in TESTS]
    outcome = await Programs(LIMITS, at_once=1).run(program, tests, limit_s=limit_s)
    assert outcome.tests == 2
    return outcome.passed, outcome.words


async def test_a_program_passes_by_what_it_prints() -> None:
    assert await ran(ADD) == (2, "")
    assert await ran("import os\nos.write(1, b'3')") == (1, "test 2 of 2: it printed '3', expected '12'")
    assert await ran("import sys\nprint(sum(map(int, sys.stdin.read().split())), flush=True); sys.exit(0)") == (2, "")


@pytest.mark.parametrize(
    "program",
    [
        "print(sum(map(int, open(0).read().split())))",
        "import threading\ndef main():\n    import time; time.sleep(0.2); print(sum(map(int, input().split())))\nthreading.Thread(target=main).start()",
        "import atexit, sys\ntotal = sum(map(int, sys.stdin.buffer.read().split()))\natexit.register(lambda: sys.__stdout__.write(str(total)))",
        "import sys\nprint(sum(map(int, input().split())))\nsys.stdout.close()",
    ],
    ids=["closes its input", "does not wait for its thread", "prints at its exit", "closes its output"],
)
async def test_a_program_ends_as_the_interpreter_would_end_it(program: str) -> None:
    assert await ran(program) == (2, "")


CONTAINED = {
    "while True: pass": "not finished in time",
    "import os\nos.fork()": "Operation not permitted",
    "kept = [bytes(64 << 20) for _ in range(1000)]": "MemoryError",
    "open('/tmp/echo2-program-stolen', 'w')": "Permission denied",
    "import socket\nsocket.socket()": "Operation not permitted",
    "import subprocess\nsubprocess.run(['/bin/true'])": "Operation not permitted",
    "import os\nos._exit(0)": "the program's process ended",
    "raise SystemExit(3)": "exit status 3",
    "print('x' * 3000000)": "printed more than",
    "1 +": "SyntaxError",
    "print(open('/etc/passwd').read())": "Permission denied",
    "import os, json\nd = json.dumps({'id': '0', 'printed': '3', 'ending': ''}).encode()\n"
    "for n in range(3, 40):\n    try: os.write(n, len(d).to_bytes(4, 'little') + d)\n    except OSError: pass": "ended",
}
CONTAINED |= {
    "import os\nos.kill(os.getpid(), 19)": "not finished in time",
    "import os, time\nfor n in range(3, 64):\n    try: os.write(n, b'\\xff\\xff\\xff\\x7f')\n    except OSError: pass\ntime.sleep(60)": "above the limit",
    "import os\nfor _ in range(2 << 20): os.write(1, b'x')": "printed more than",
    "import sys\nsys.setrecursionlimit(10**9)\ndeep = []\nfor _ in range(10**6): deep = [deep]\nrepr(deep)": "SIGSEGV",
    "raise ValueError('half \\ud800')": "ValueError",
    "class Odd(BaseException):\n    def __str__(self): raise SystemExit(0)\nraise Odd": "Odd",
    "class Odd:\n    def __str__(self): raise ValueError('no')\nraise SystemExit(Odd())": "the program's process ended",
    "import fcntl, os\nfcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid())": "Operation not permitted",
    "open('/dev/shm/echo2-program-stolen', 'w')": "Permission denied",
    "import os\nprint(open(f'/proc/{os.getppid()}/environ').read())": "Permission denied",
    "import os\nprint(os.listdir('/tmp'))": "Permission denied",
}
QUICK = ("while True: pass", "import os\nos.fork()", "import os\nos._exit(0)", "1 +")


@pytest.mark.parametrize("programs", [QUICK, pytest.param(tuple(CONTAINED), marks=pytest.mark.long)], ids=["some", "all"])
async def test_what_a_program_does_to_its_process_only_fails_its_test(programs: tuple[str, ...]) -> None:
    for program in programs:
        passed, words = await ran(program, limit_s=1.0 if CONTAINED[program] == "not finished in time" else 10.0)
        assert passed == 0
        assert CONTAINED[program] in words, program
    assert not Path("/tmp/echo2-program-stolen").exists()


@pytest.fixture
async def plane(tmp_path: Path, made: ModuleType) -> AsyncIterator[JailedDataPlane]:
    rows = made.write_rows(tmp_path / "rows.jsonl", [{"prompt": "Add two numbers.", "tests": TESTS}])
    started = made.make_plane(
        made.write_model(tmp_path / "m"), environment={"type": "code", "grade_timeout_s": 10.0}, limits=LIMITS, train=rows
    )
    await started.start()
    yield started
    await started.close()


async def test_completions_are_scored_by_all_their_tests(plane: JailedDataPlane, made: ModuleType) -> None:
    completions = [made.ids_of("import sys\nprint(sum(map(int, sys.stdin.read().split())))"), made.ids_of("print(3)")]
    graded = await plane.grade("train", 0, completions)
    assert [(one.outcome, one.reward) for one in graded] == [("scored", 1.0), ("scored", 0.0)]
    assert graded[1].detail == "test 2 of 2: it printed '3', expected '12'"
    assert graded[1].text == "print(3)"
    assert plane.reward_metrics() == {"tests_passed": 0.75}


async def test_a_bad_answer_of_the_child_is_no_score(plane: JailedDataPlane) -> None:
    for answer in ({"programs": ["a"]}, {"programs": ["a"], "texts": ["a"], "tests": []}, {"programs": 3, "texts": 4, "tests": 5}):
        (one,) = (await plane._settled(answer, [1])).graded
        assert (one.outcome, one.reward) == ("failed", None)


async def test_rows_without_tests_stop_the_job_at_its_start(tmp_path: Path, made: ModuleType) -> None:
    rows = made.write_rows(tmp_path / "rows.jsonl", [{"prompt": "x", "tests": TESTS}, {"prompt": "y"}])
    plane = made.make_plane(made.write_model(tmp_path / "m"), environment={"type": "code"}, train=rows)
    with pytest.raises(EnvironmentBroken, match=r"rows\.jsonl line 2: column 'tests'"):
        await plane.start()
