"""reasoning-gym's tasks: deterministic, scored by their own scorers, refused in words."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

from coordinator.environments import reasoning_gym_tasks
from coordinator.environments.base import Completion, EnvironmentBroken, EnvironmentSpec
from coordinator.environments.build import build_environment
from coordinator.environments.reasoning_gym_tasks import ReasoningGym, is_plain_expression

pytest.importorskip("reasoning_gym", reason="the extra reasoning-gym is not installed")


def task(name: str, *, seed: int = 3, options: dict[str, Any] | None = None, limit_s: float = 10.0) -> ReasoningGym:
    return ReasoningGym(name, seed=seed, options=options or {}, limit_s=limit_s)


def rewards(environment: ReasoningGym, index: int, *texts: str) -> list[float | None]:
    scores = environment.score("train", index, [Completion([1], text) for text in texts])
    return [one.reward for one in scores.outcomes]


@pytest.mark.parametrize("name", ["leg_counting", "chain_sum", "countdown", "spiral_matrix", "polynomial_multiplication"])
def test_problems_are_a_function_of_seed_split_and_index(name: str) -> None:
    """In any order, across the chunks that items are made in; another seed or split gives others."""
    indices = [0, 1, 99, 100, 1234]
    first, again = task(name), task(name)
    forward = [first.prompt("train", index) for index in indices]
    assert forward == [again.prompt("train", index) for index in reversed(indices)][::-1]
    assert forward != [task(name, seed=4).prompt("train", index) for index in indices]
    assert forward != [first.prompt("eval", index) for index in (0, 1, 99, 100, 1000)]
    assert len(set(forward)) == len(forward)


def test_leg_counting_is_scored_by_the_package() -> None:
    """The right number is worth 1, in an answer tag, a box or alone; another one is not."""
    environment = task("leg_counting")
    right = str(environment._entry("train", 5)["answer"])
    wrong = str(int(right) + 1)
    dressed = [f"so <answer> {right} </answer>", rf"\boxed{{{right}}}", f"#### {right}", f" {right}\n"]
    assert rewards(environment, 5, *dressed) == [1.0] * 4
    assert all(reward is not None and reward < 0.1 for reward in rewards(environment, 5, f"<answer>{wrong}</answer>", "no idea"))


def test_options_reach_the_task_and_wrong_ones_are_refused() -> None:
    environment = task("chain_sum", options={"min_terms": 6, "max_terms": 6})
    assert all(len(re.findall(r"\d+", environment.prompt("train", index))) >= 6 for index in range(5))
    with pytest.raises(EnvironmentBroken, match=r"options .*'terms': 3.* do not suit reasoning_gym:chain_sum: .*min_terms"):
        task("chain_sum", options={"terms": 3})
    with pytest.raises(EnvironmentBroken, match=r"do not suit reasoning_gym:chain_sum"):
        task("chain_sum", options={"min_terms": 9, "max_terms": 2})


def test_an_unknown_task_is_refused_with_near_names() -> None:
    with pytest.raises(EnvironmentBroken, match=r"'leg_count', which is none of its .*: near are .*leg_counting"):
        task("leg_count")


def test_without_the_package_the_words_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(reasoning_gym_tasks.importlib, "import_module", absent)
    with pytest.raises(EnvironmentBroken, match=r"needs the package reasoning-gym .*pip install 'echo2\[reasoning-gym\]'"):
        task("leg_counting")


def test_files_are_refused_and_so_are_options_elsewhere(tmp_path: Path, made: ModuleType) -> None:
    rows = str(made.write_rows(tmp_path / "t.jsonl", [{"prompt": "q", "answer": 1}]))
    for spec, words in [
        (EnvironmentSpec("reasoning_gym:leg_counting", 0, "", train=rows), "makes its own problems"),
        (EnvironmentSpec("math", 0, "", train=rows, options={"size": 3}), "environment.options is set, and 'math' takes none"),
    ]:
        with pytest.raises(EnvironmentBroken, match=words):
            build_environment(spec)


@pytest.mark.parametrize("name", ["string_insertion", "spiral_matrix", "binary_matrix", "n_queens"])
def test_scorers_that_evaluate_answers_read_literals_only(name: str, tmp_path: Path) -> None:
    """Fault 17: an answer that is a program would run in the scorer, and could forge the rewards that follow."""
    mark = tmp_path / "ran"
    environment = task(name)
    (reward,) = rewards(environment, 0, f"<answer>[open({str(mark)!r}, 'w')]</answer>")
    assert reward is None or reward < 0.1
    assert not mark.exists()
    assert rewards(environment, 0, f"<answer>{environment._entry('train', 0)['answer']}</answer>") == [1.0]


@pytest.mark.parametrize("name", ["countdown", "puzzle24", "simple_integration", "polynomial_multiplication"])
def test_scorers_that_parse_with_sympy_get_plain_expressions_only(name: str, tmp_path: Path) -> None:
    """Sympy's parser evaluates what it is given."""
    mark = tmp_path / "ran"
    environment = task(name)
    hostile = f"__import__('pathlib').Path('{mark}').touch() or 24"
    assert rewards(environment, 0, f"<answer>{hostile}</answer>") == [0.0]
    assert not mark.exists()
    if name != "puzzle24":  # which keeps no answer of its own
        assert rewards(environment, 0, f"<answer>{environment._entry('train', 0)['answer']}</answer>") == [1.0]


def test_a_scorer_that_a_task_inherits_is_disarmed_where_it_was_written(tmp_path: Path) -> None:
    """The module of the task is another one, and its `eval` was never in the way."""
    home = {"__name__": "home"}
    source = "class Task:\n    def score_answer(self, answer, entry):\n        return eval(answer)\n"
    path = tmp_path / "home.py"
    path.write_text(source)
    exec(compile(source, str(path), "exec"), home)
    heir = type("Heir", (home["Task"],), {"__module__": __name__})  # type: ignore[arg-type]
    mark = tmp_path / "ran"
    assert reasoning_gym_tasks._disarm(heir) is False
    with pytest.raises(ValueError, match="malformed node"):
        heir().score_answer(f"open({str(mark)!r}, 'w')", {})
    assert not mark.exists()


def test_a_composite_is_refused_with_what_to_use_instead() -> None:
    """Its parts' scorers would evaluate answers, unseen."""
    with pytest.raises(EnvironmentBroken, match=r"reasoning_gym:composite: list its tasks in environment\.sources instead"):
        task("composite", options={"datasets": ["countdown"]})


@pytest.mark.parametrize("options", [{"min_terms": "two"}, {"min_terms": 2, "max_terms": 0.5}])
def test_options_that_a_task_trips_over_are_refused_too(options: dict[str, Any]) -> None:
    with pytest.raises(EnvironmentBroken, match=r"do not suit reasoning_gym:chain_sum: \w+Error: .*its parameters: min_terms"):
        task("chain_sum", options=options)


def reached(task_class: Any) -> dict[str, set[str]]:
    """Every function of the package that a task's scorer may call, with the names that it uses and the package does not define."""
    found: dict[str, set[str]] = {}
    waiting = [task_class.score_answer]
    while waiting:
        function = waiting.pop()
        function = getattr(function, "__func__", function)
        if not isinstance(function, FunctionType) or function.__qualname__ in found or not is_the_packages(function):
            continue
        names = names_of(function.__code__)
        found[function.__qualname__] = {name for name in names if not is_the_packages(function.__globals__.get(name))}
        for name in names:
            held = function.__globals__.get(name)
            waiting += vars(held).values() if isinstance(held, type) else [held, getattr(task_class, name, None)]
    return found


def is_the_packages(held: Any) -> bool:
    return str(getattr(held, "__module__", "")).startswith("reasoning_gym")


def names_of(code: CodeType) -> set[str]:
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return set(code.co_names).union(*map(names_of, inner))


def test_no_scorer_of_this_release_evaluates_answers_in_another_way() -> None:
    """Through helpers as little as by itself. A new release of the package may: then this says which task to look at."""
    risky = {"eval", "exec", "compile", "__import__", "sympify", "parse_expr", "S", "import_module", "system", "Popen"}
    registry = importlib.import_module("reasoning_gym.factory").DATASETS
    found = {
        (name, function): names & risky
        for name, (task_class, _) in registry.items()
        for function, names in reached(task_class).items()
        if names & risky
    }
    parsing = {"countdown", "puzzle24", "simple_integration", "intermediate_integration", "polynomial_multiplication"}
    evaluating = {"binary_matrix", "n_queens", "number_sorting", "spiral_matrix", "string_insertion"}
    assert {name for (name, _), names in found.items() if names == {"parse_expr"}} == parsing
    assert {name for (name, _), names in found.items() if names == {"eval"}} == evaluating | {"bitwise_arithmetic"}
    assert {name: function for name, function in found if not function.endswith(".score_answer")} == {
        "bitwise_arithmetic": "verify_solution"  # which evaluates the package's own problem
    }
    assert len(found) == len(parsing | evaluating) + 1
    assert all("parse_expr(answer" in inspect.getsource(registry[name][0].score_answer) for name in parsing)


@pytest.mark.parametrize(
    ("text", "is_plain"),
    [
        ("3*(4+5)/2", True),
        ("x**2 + 1.5*x + C", True),
        ("-cos(2*x)/3", True),
        ("x.__class__", False),
        ("lambda: 0", False),
        ("'a'", False),
        ("open", False),
        ("exec(1)", False),
        ("a[0]", False),
        ("_", False),
    ],
)
def test_plain_expressions(text: str, is_plain: bool) -> None:
    assert is_plain_expression(text) is is_plain


@pytest.mark.long
def test_every_task_makes_problems_and_scores_its_own_answers() -> None:
    """All that the package has, but those that need parameters or are slow to make. Tasks without one right answer are listed."""
    registry = importlib.import_module("reasoning_gym.factory").DATASETS
    no_own_answer = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour", "puzzle24"}
    checked = 0
    for name in sorted(set(registry) - {"composite", "arc_agi", "knight_swap", "rearc"}):
        environment = task(name)
        entry = environment._entry("train", 7)
        assert environment.prompt("train", 7) == task(name).prompt("train", 7), name
        if name not in no_own_answer:
            assert rewards(environment, 7, f"<answer>{entry['answer']}</answer>") == [1.0], name
            checked += 1
    print(f"\n{checked} tasks of reasoning-gym score their own answers 1")
