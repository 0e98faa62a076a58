r"""The math environment on MATH-style answers: equal is 1, unequal is 0, and what cannot be told is neither."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import ModuleType

import pytest

from coordinator.environments import algebra
from coordinator.environments.alarm import OutOfTime, time_limit
from coordinator.environments.base import Completion, EnvironmentBroken, EnvironmentSpec, Outcome
from coordinator.environments.build import build_environment

Grade = Callable[..., Outcome]


@pytest.fixture
def grade(tmp_path: Path, made: ModuleType) -> Grade:
    """The outcome of a completion for a reference."""

    def run(reference: str, completion: str, *, limit_s: float = 15.0) -> Outcome:
        rows = made.write_rows(tmp_path / "rows.jsonl", [{"prompt": "q", "answer": reference}])
        environment = build_environment(EnvironmentSpec("math", 0, "", train=str(rows), grade_timeout_s=limit_s))
        return environment.score("train", 0, [Completion([1], completion)]).outcomes[0]

    return run


EQUAL = [
    (r"\frac{1}{2}", "0.5"),
    (r"\frac{1}{2}", r"\frac{2}{4}"),
    (r"\frac12", "1/2"),
    (r"3\sqrt{2}", r"\sqrt{18}"),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"),
    ("1024", "2^{10}"),
    ("120", r"5 \cdot 4!"),
    ("7", "10 - 3"),
    ("x^2 + 2x + 1", "(x+1)^2"),
    ("x + y", "y + x"),
    (r"\frac{x}{2}", "0.5x"),
    ("y = 2x + 1", "2x + 1"),
    ("(1, 2)", "(1,2)"),
    (r"\{1, 2\}", "2, 1"),
    ("[0, 1)", "[0,1)"),
    (r"(-\infty, 3]", r"(-\infty,3]"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"2\pi", r"\pi + \pi"),
    (r"1 + 2i", r"2i + 1"),
    (r"\text{Evelyn}", r"\text{Evelyn}"),
    ("5", "x = 5"),
    ("5", r"5\text{ cm}"),
    ("90", r"90^\circ"),
    (r"1{,}234", "1234"),
    ("11\\frac{1}{2}", "11.5"),
]
UNEQUAL = [
    (r"\frac{1}{2}", r"\frac{1}{3}"),
    (r"\frac{1}{3}", "0.33"),
    (r"3\sqrt{2}", r"3\sqrt{3}"),
    (r"\sqrt{2}", "1.41421356"),
    ("1024", "2^{11}"),
    ("7", "10 + 3"),
    ("3", "10 - 3"),
    ("2", "2x"),
    ("2", "1, 2"),
    ("4", "2x = 4"),
    ("2", "x = 1, y = 2"),
    ("x^2 + 2x + 1", "(x+2)^2"),
    ("x + y", "x - y"),
    ("(1, 2)", "(2, 1)"),
    ("[0, 1)", "[0, 1]"),
    (r"2\pi", "2"),
    (r"2\pi", "6.28318"),
    ("1 + 2i", "1 - 2i"),
    (r"\text{Evelyn}", r"\text{Briana}"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\3\end{pmatrix}"),
    ("5", r"\text{five or so}"),
    ("5", "}{"),
    ("x", ""),
]


@pytest.mark.parametrize(("reference", "answer"), EQUAL)
def test_equal_answers_score_one(grade: Grade, reference: str, answer: str) -> None:
    outcome = grade(reference, rf"Reasoning with 7 and 8. So \boxed{{{answer}}}.")
    assert (outcome.kind, outcome.reward) == ("scored", 1.0), outcome.detail


@pytest.mark.parametrize(("reference", "answer"), UNEQUAL)
def test_unequal_answers_score_zero(grade: Grade, reference: str, answer: str) -> None:
    outcome = grade(reference, rf"So \boxed{{{answer}}}.")
    assert (outcome.kind, outcome.reward) == ("scored", 0.0), outcome.detail


def test_a_worked_solution_is_a_reference_and_dollars_are_a_mark_of_last_resort(grade: Grade) -> None:
    """MATH keeps its answer in the solution's box; a completion without a mark may end in a formula between dollars."""
    solution = r"We have $x^2 = 12$, so $x = \boxed{2\sqrt{3}}$ as claimed."
    assert grade(solution, r"The answer is $\sqrt{12}$.").reward == 1.0
    assert grade(solution, r"The answer is $\sqrt{13}$.").reward == 0.0
    assert grade(solution, "I do not know.").reward == 0.0


def expanded(rng: Random, change: int) -> tuple[str, str]:
    """A product of two linear terms, and its expansion by hand with the constant changed."""
    a, b, c = (rng.randint(2, 9) for _ in range(3))
    return f"({a}x + {b})(x + {c})", f"{a}x^2 + {a * c + b}x + {b * c + change}"


@pytest.mark.parametrize("seed", range(8))
def test_expansions_are_equal_and_changed_ones_are_not(seed: int) -> None:
    """(ax + b)(x + c) = ax² + (ac + b)x + bc."""
    rng = Random(seed)
    for change in (0, 0, rng.randint(1, 5), -rng.randint(1, 5)):
        left, right = expanded(rng, change)
        assert algebra.is_same(left, right, is_marked=True) is (change == 0)
        assert algebra.is_same(right, left, is_marked=True) is (change == 0)


def test_what_takes_too_long_is_a_time_out_and_never_a_zero(grade: Grade) -> None:
    """A product of ten million factors; the time limit is the completion's own, in the process's main thread."""
    outcome = grade("12", r"\boxed{\prod_{i=1}^{10000000} i}", limit_s=0.5)
    assert (outcome.kind, outcome.reward) == ("timeout", None)
    assert "0.4 s" in outcome.detail
    deep = "(" * 500 + "1" + ")" * 500
    assert grade("12", rf"\boxed{{{deep}}}", limit_s=0.5).kind == "timeout"


@pytest.mark.parametrize("answer", ["9^{9^{9^9}}", "10^{10^{10}}", "(10^9)!", "((9!)!)!", "1.5^{1000000}", r"2^{9!}"])
def test_a_value_too_large_to_write_out_is_a_failure_and_never_a_zero(grade: Grade, answer: str) -> None:
    """It would be one endless call into C, which no signal interrupts."""
    outcome = grade("12", rf"\boxed{{{answer}}}")
    assert (outcome.kind, outcome.reward) == ("failed", None)
    assert "more than 10000 digits" in outcome.detail


def test_large_values_that_can_be_written_out_are_compared(grade: Grade) -> None:
    assert grade(str(2**200), r"\boxed{2^{200}}").reward == 1.0
    assert grade(str(2**200 + 1), r"\boxed{2^{200}}").reward == 0.0
    assert grade("3628800", r"\boxed{10 \cdot 9!}").reward == 1.0
    assert grade("12", r"\boxed{2^{2^2} - 4}").reward == 1.0


def test_an_error_of_the_comparison_is_a_failure_with_its_words(grade: Grade, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 15 elsewhere: a broad except turned every score into 0."""
    import math_verify

    def broken(*_: object, **__: object) -> bool:
        raise ValueError("sympy is confused")

    monkeypatch.setattr(math_verify, "verify", broken)
    outcome = grade("x^2", r"\boxed{x \cdot x}")
    assert (outcome.kind, outcome.reward) == ("failed", None)
    assert "ValueError: sympy is confused" in outcome.detail


def test_a_process_that_ran_out_of_time_is_spent(tmp_path: Path, made: ModuleType) -> None:
    """What was interrupted may be half done. The other completions of the prompt have their scores."""
    rows = made.write_rows(tmp_path / "rows.jsonl", [{"prompt": "q", "answer": "x^2"}])
    environment = build_environment(EnvironmentSpec("math", 0, "", train=str(rows), grade_timeout_s=2.0))
    texts = [r"\boxed{x \cdot x}", r"\boxed{\prod_{i=1}^{10000000} i}", r"\boxed{x}"]
    scores = environment.score("train", 0, [Completion([1], text) for text in texts])
    assert [(one.kind, one.reward) for one in scores.outcomes] == [("scored", 1.0), ("timeout", None), ("scored", 0.0)]
    assert scores.is_spent
    assert not environment.score("train", 0, [Completion([1], texts[0])]).is_spent


def test_a_time_limit_outside_the_main_thread_is_refused_not_ignored() -> None:
    """There, signals would not come, and math-verify's own limit would fail."""
    caught: list[BaseException] = []

    def work() -> None:
        try:
            with time_limit(1.0):
                raise AssertionError("the body ran")
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "main thread" in str(caught[0])


def stubborn() -> None:
    while True:
        try:
            sum(range(1000))
        except Exception:
            continue


def test_code_that_catches_exception_does_not_swallow_the_limit() -> None:
    """And the alarm is off afterwards, with the handler that was there before."""
    import signal

    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(OutOfTime), time_limit(0.05):
        stubborn()
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_an_alarm_in_the_callback_of_a_weak_reference_rings_again_and_is_no_error_there() -> None:
    """Nothing is raised out of such a callback: without a second alarm, work would go on for another whole limit."""
    import sys
    import weakref

    calls = 0

    class Mark:
        pass

    def spin(_: object) -> None:
        nonlocal calls
        calls += 1
        while True:
            pass

    def work() -> None:
        mark = Mark()
        kept = weakref.ref(mark, spin)
        del mark
        while kept() is None:
            pass

    before = sys.unraisablehook
    with pytest.raises(OutOfTime), time_limit(0.05):
        work()
    assert calls == 1
    assert sys.unraisablehook is before


def test_answers_are_never_evaluated_as_python(grade: Grade, tmp_path: Path) -> None:
    """Only the LaTeX grammar reads them."""
    mark = tmp_path / "ran"
    for answer in (f"__import__('pathlib').Path('{mark}').touch()", "().__class__.__base__", "exec(1)"):
        assert grade("x^2", rf"\boxed{{{answer}}}").reward in (0.0, None)
        assert grade("x^2", f"#### {answer}").reward in (0.0, None)
    assert not mark.exists()


@pytest.mark.parametrize("reference", ["nobody knows", "", "x" * 3000])
def test_a_reference_that_is_none_is_named_with_its_line(grade: Grade, reference: str) -> None:
    with pytest.raises(EnvironmentBroken, match=r"rows.jsonl line 1: column 'answer' holds no number or formula"):
        grade(reference, "x")
