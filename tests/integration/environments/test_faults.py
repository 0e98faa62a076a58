"""Faults of other systems, tried on the real grading processes and on all of the product's code; the numbers are those of docs/faults.md."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path
from types import ModuleType

import pytest

from coordinator.environments.base import Completion, EnvironmentSpec
from coordinator.environments.build import build_environment
from coordinator.environments.pool import PoolSettings

ROOT = Path(__file__).parents[3]
PRODUCT = ("coordinator", "worker_node", "p2p", "pricing", "simulator", "migrations")
RUNS_TEXT = {"eval", "exec", "compile"}
READS_OBJECTS = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
ENTRANCES = ("eval", "exec", "compile", "torch.load", "trust_remote_code", *READS_OBJECTS)
IN_THE_JAIL = {"coordinator/environments/program_child.py"}  # programs as a task: the child that runs them is jailed
HANGS = """
import time
def reward(completions, **_):
    if completions[0] == "hang": time.sleep(60)
    return [1.0] * len(completions)
"""


async def test_fault_16_checks_that_hang_do_not_eat_the_pool(tmp_path: Path, made: ModuleType) -> None:
    """Three that hang in a pool of two: each ends as a time-out, never as a score, and the next check is served."""
    plane = made.reward_plane(tmp_path, HANGS, settings=PoolSettings(processes=2), environment={"grade_timeout_s": 0.7})
    await plane.start()
    hung = await asyncio.gather(*(plane.grade("train", 0, [made.ids_of("hang")]) for _ in range(3)))
    (fine,) = await plane.grade("train", 0, [made.ids_of("fine")])
    await plane.close()
    assert [(graded.outcome, graded.reward) for (graded,) in hung] == [("timeout", None)] * 3
    assert (fine.outcome, fine.reward) == ("scored", 1.0)


@pytest.mark.parametrize("kind", ["digit_sort", "countdown"])
def test_fault_17_what_a_model_writes_is_read_and_never_run(kind: str, tmp_path: Path) -> None:
    """Text that is code, and would be right if it were run, is a wrong answer and leaves no trace."""
    trace = tmp_path / "trace"
    environment = build_environment(EnvironmentSpec(kind, 0, str(tmp_path)))
    code = f"__import__('pathlib').Path({str(trace)!r}).touch()"
    texts = [code, f"[{code}, 19][1]", "7 if 1 else 0", "open('/etc/passwd')"]
    (*outcomes,) = environment.score("train", 0, [Completion((), text) for text in texts]).outcomes
    assert [(outcome.kind, outcome.reward) for outcome in outcomes] == [("scored", 0.0)] * 4
    assert not trace.exists()


def test_fault_17_nothing_of_the_product_runs_text_or_unpickles_bytes() -> None:
    """Over the syntax trees of all files: no eval, exec, compile, pickle and the like, no torch.load, no remote code of a model."""
    sources = {path: path.read_text() for package in PRODUCT for path in sorted((ROOT / package).rglob("*.py"))}
    assert len(sources) > 300
    found = {
        f"{path.relative_to(ROOT)}": words
        for path, source in sources.items()
        if any(word in source for word in ENTRANCES) and (words := forbidden(ast.parse(source)))
    }
    assert {name: words for name, words in found.items() if name not in IN_THE_JAIL} == {}


def test_fault_17_the_search_itself_finds_what_it_looks_for() -> None:
    """One line of each kind."""
    lines = ["eval(a)", "builtins.exec(a)", "import pickle", "from dill import loads", "torch.load(a)", "f(trust_remote_code=True)"]
    assert [bool(forbidden(ast.parse(line))) for line in lines] == [True] * len(lines)
    assert forbidden(ast.parse("re.compile(a)\nmodel.eval()\nf(trust_remote_code=False)")) == []


def forbidden(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, what) of everything that would run or unpickle what it is given."""
    return [(node.lineno, word) for node in ast.walk(tree) if (word := _word(node))]


def _word(node: ast.AST) -> str:
    match node:
        case ast.Import(names=names):
            return next((each.name for each in names if each.name.partition(".")[0] in READS_OBJECTS), "")
        case ast.ImportFrom(module=str(module)):
            return module if module.partition(".")[0] in READS_OBJECTS else ""
        case ast.Call(func=ast.Name(id=name)) if name in RUNS_TEXT:
            return name
        case ast.Call(func=ast.Attribute(attr=name, value=ast.Name(id="builtins"))) if name in RUNS_TEXT:
            return name
        case ast.Call(func=ast.Attribute(attr="load", value=ast.Name(id="torch"))):
            return "torch.load"
        case ast.keyword(arg="trust_remote_code", value=ast.Constant(value=True)):
            return "trust_remote_code"
    return ""
