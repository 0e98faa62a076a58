"""The kinds of environment in real jailed processes: what scores them loads and runs there, and one completion costs the others nothing."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from coordinator.environments.jail import JailLimits
from coordinator.environments.plane import DataPlaneSpec, JailedDataPlane
from coordinator.service.ports import Graded
from coordinator.wire.environment import EnvironmentConfig

CODE = """
def brevity(completions, **_): return [1.0 / max(1, len(text)) for text in completions]
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == str(ground_truth)), "length": len(solution_str)}
"""


def figures(graded: list[Graded]) -> list[tuple[str, float | None]]:
    return [(one.outcome, one.reward) for one in graded]


async def test_math_verify_scores_in_the_jail_within_its_limit(tmp_path: Path, made: ModuleType) -> None:
    """A value too large to write out is that completion's failure, and is counted."""
    rows = made.write_rows(tmp_path / "t.jsonl", [{"prompt": "q", "answer": r"\frac{\sqrt{3}}{2}"}])
    plane = made.make_plane(made.write_model(tmp_path / "m"), environment={"type": "math", "grade_timeout_s": 10}, train=rows)
    await plane.start()
    texts = [r"\boxed{\frac{3}{2\sqrt{3}}}", r"\boxed{\frac{1}{2}}", r"\boxed{((9!)!)!}"]
    graded = await plane.grade("train", 0, [made.ids_of(text) for text in texts])
    assert figures(graded) == [("scored", 1.0), ("scored", 0.0), ("failed", None)]
    assert plane.outcome_shares()["failed"] == pytest.approx(1 / 3)
    assert plane.restarts == 0
    await plane.close()


async def test_a_completion_that_takes_the_process_along_costs_the_others_nothing(tmp_path: Path, made: ModuleType) -> None:
    """The CPU limit ends the process in the middle of a group: the rest is graded one by one, and that one is a time-out."""
    rows = made.write_rows(tmp_path / "t.jsonl", [{"prompt": "q", "answer": "x+1"}])
    plane = made.make_plane(
        made.write_model(tmp_path / "m"),
        environment={"type": "math", "grade_timeout_s": 60},
        limits=JailLimits(cpu_s=0.3),
        train=rows,
    )
    await plane.start()
    endless = r"\boxed{" + "(" * 400 + "1" + ")" * 400 + "}"
    graded = await plane.grade("train", 0, [made.ids_of(text) for text in (r"\boxed{1+x}", endless, r"\boxed{x}")])
    assert figures(graded) == [("scored", 1.0), ("timeout", None), ("scored", 0.0)]
    assert plane.outcome_shares()["timeout"] == pytest.approx(1 / 3)
    await plane.close()


async def test_several_rewards_and_sources_in_the_jail(tmp_path: Path, made: ModuleType) -> None:
    """Two sources, one scored by verl's function, one by math and a function of TRL's shape; metrics arrive."""
    files = {
        "a.jsonl": made.write_rows(tmp_path / "a.jsonl", [{"prompt": "a", "answer": 4}]),
        "b.jsonl": made.write_rows(tmp_path / "b.jsonl", [{"prompt": "b", "answer": 5}]),
        "r.py": tmp_path / "r.py",
    }
    files["r.py"].write_text(CODE)
    config = EnvironmentConfig.model_validate(
        {
            "type": "dataset",
            "sources": [{"name": "a", "train": "a.jsonl"}, {"name": "b", "train": "b.jsonl", "weight": 3}],
            "rewards": [
                {"type": "math"},
                {"type": "python:r.py:brevity", "weight": 0.5},
                {"type": "python:r.py:compute_score", "weight": 0},
            ],
        }
    )
    spec = DataPlaneSpec(config, 7, made.write_model(tmp_path / "m"), files=files)
    plane = JailedDataPlane(spec, processes=1)
    info = await plane.start()
    assert (info.train_prompts, info.eval_prompts) == (None, 0)
    prompts = await plane.prompts("train", range(40))
    texts = [prompt.text for prompt in prompts]
    assert set(texts) == {"a", "b"}
    answers = {"a": "4", "b": "5"}
    for prompt in prompts[:8]:
        graded = await plane.grade("train", prompt.index, [made.ids_of(answers[prompt.text]), made.ids_of("77")])
        assert figures(graded) == [("scored", 1.5), ("scored", 0.25)]
    assert plane.reward_metrics() == {
        "math": 0.5,
        "brevity": 0.75,
        "compute_score": 0.5,
        "length": 1.5,
        **{f"source/{name}": 0.875 for name in set(texts[:8])},
    }
    await plane.close()


async def test_a_reasoning_gym_task_in_the_jail(tmp_path: Path, made: ModuleType) -> None:
    """The package loads there and scores."""
    pytest.importorskip("reasoning_gym", reason="the extra reasoning-gym is not installed")
    environment = {"type": "reasoning_gym:chain_sum", "options": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
    plane = made.make_plane(made.write_model(tmp_path / "m"), environment=environment)
    info = await plane.start()
    assert (info.train_prompts, info.eval_prompts) == (None, 1024)
    (prompt,) = await plane.prompts("train", [5000])
    words = prompt.text.split("=")[0].removeprefix("State the final answer to the following arithmetic problem: ").split()
    answer = int(words[0]) + int(words[2]) if words[1] == "+" else int(words[0]) - int(words[2])
    graded = await plane.grade("train", 5000, [made.ids_of(str(answer)), made.ids_of("x")])
    assert figures(graded) == [("scored", 1.0), ("scored", 0.0)]
    await plane.close()
