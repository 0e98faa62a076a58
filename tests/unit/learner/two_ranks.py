"""What two ranks do in `test_ranks.py`: rank 1 is `python -m tests.unit.learner.two_ranks FOLDER`, rank 0 the test's own process.

Every scenario is a function of the team, the same for one rank as for two, and gives tensors to compare.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from coordinator.learner import checkpoint, export, generate, model, process, step
from coordinator.learner.parts import local, whole
from coordinator.learner.team import Team, join
from coordinator.wire.job import JobConfig

Found = dict[str, Tensor]
MICRO = 64  # tokens; gives an odd number of micro-batches, so that one rank is idle at the end
PROMPTS = ((3, 4, 5), (6,), (7, 8), (9, 10, 11, 12), (13,))
LIMITS = (5, 2, 5, 0, 4)  # so that ranks have unequal work


def factories() -> ModuleType:
    """tests/factories_learner.py, which is in no package."""
    if "factories_learner" not in sys.modules:
        spec = importlib.util.spec_from_file_location("factories_learner", Path(__file__).parents[2] / "factories_learner.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules["factories_learner"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["factories_learner"])
    return sys.modules["factories_learner"]


made = factories()


def config(**changed: Any) -> JobConfig:
    found: JobConfig = made.config(micro_batch_tokens=MICRO, truncated="keep", **changed)
    return found


def learner(team: Team, folder: Path, settings: JobConfig, *, dtype: torch.dtype = torch.float64) -> step.Learner:
    policy = model.load(folder / "tiny")
    policy.model.to(dtype)
    torch.manual_seed(5)
    return step.start(policy, settings, team=team)


def weights(one: step.Learner) -> Found:
    return {name: whole(part).clone() for name, part in one.policy.trained().items()}


def gradient(one: step.Learner) -> Found:
    """Of the batch's loss, before clip and optimiser."""
    tally = step.gradients(one, made.batch(seed=5))
    assert tally.tokens == len(made.batch(seed=5).token_ids), "each token is counted once, whoever forwarded it"
    found = {name: whole(parameter.grad).clone() for name, parameter in one.policy.trained().items()}
    one.optimizer.zero_grad(set_to_none=True)
    return found


def steps(one: step.Learner, count: int) -> Found:
    figures = [step.take_step(one, made.batch(step=one.step, seed=one.step)) for _ in range(count)]
    names = sorted(figures[0])
    return weights(one) | {f"figures of step {at}": torch.tensor([each[name] for name in names]) for at, each in enumerate(figures)}


def full(team: Team, folder: Path) -> Found:
    return {f"gradient {name}": each for name, each in gradient(learner(team, folder, config())).items()} | steps(
        learner(team, folder, config()), 5
    )


def single_precision(team: Team, folder: Path) -> Found:
    return gradient(learner(team, folder, config(), dtype=torch.float32))


def adapters_and_reference(team: Team, folder: Path) -> Found:
    return steps(
        learner(team, folder, config(lora={"rank": 3, "alpha": 8}, reference_kl=0.1, learner={"gradient_checkpointing": True})), 2
    )


def padded_with_reference(team: Team, folder: Path) -> Found:
    return steps(learner(team, folder, config(reference_kl=0.1, learner={"packing": False})), 2)


def autocast(team: Team, folder: Path) -> Found:
    return gradient(learner(team, folder, config(learner={"dtype": "bfloat16"}), dtype=torch.float32))


def mapped(team: Team, folder: Path) -> Found:
    """From a directory in bf16, as most are: one rank reads it in fp32, two leave it in its file until they shard it."""
    policy = model.load(folder / "half") if team.size == 1 else model.load_mapped(folder / "half")
    assert {each.dtype for each in policy.model.parameters()} == {torch.float32 if team.size == 1 else torch.bfloat16}
    one = step.start(policy, config(reference_kl=0.1), team=team)
    assert {local(each).dtype for each in one.policy.model.parameters()} == {torch.float32}
    return {f"gradient {name}": each for name, each in gradient(one).items()} | steps(one, 2)


def written(team: Team, folder: Path) -> Found:
    """Two steps, a checkpoint, a snapshot and what it says; then on from the checkpoint that one rank wrote."""
    one = learner(team, folder, config(), dtype=torch.float32)
    if team.size > 1:
        checkpoint.restore(one, folder / "by-one", job_id=made.JOB)
        step.take_step(one, made.batch(step=one.step, seed=one.step))
    else:
        steps(one, 1)
        checkpoint.write(one, folder / "by-one", job_id=made.JOB, ledger_step=1)
        checkpoint.restore(one, folder / "by-two", job_id=made.JOB)
    if team.size > 1:
        put(team, lambda: checkpoint.write(one, folder / "by-two", job_id=made.JOB, ledger_step=2), lambda: checkpoint.follow(one))
    directory = folder / f"v2-of-{team.size}"
    put(team, lambda: export.write(one.policy, directory), lambda: export.follow(one.policy))
    return spoken(team, one) | steps(one, 1)


def spoken(team: Team, one: step.Learner) -> Found:
    said = generate.greedy(one.policy, PROMPTS, max_new_tokens=LIMITS, stop_token_ids=(1,), token_budget=8, team=team)
    return {
        "greedy": torch.tensor([token for ids in said for token in (*ids, -1)]).double(),
        "canary": torch.tensor(export.canary(one.policy, (2, 9, 4, 7))),
    }


def adapters_written(team: Team, folder: Path) -> Found:
    """A snapshot with adapters, after a step."""
    one = learner(team, folder, config(lora={"rank": 3, "alpha": 8}), dtype=torch.float32)
    steps(one, 1)
    directory = folder / f"adapted-by-{team.size}"
    put(team, lambda: export.write(one.policy, directory), lambda: export.follow(one.policy))
    return {"canary": torch.tensor(export.canary(one.policy, (2, 9, 4, 7)))}


def disk_full(team: Team, folder: Path) -> Found:
    """The one rank that writes fails, twice; the other does not wait for ever, and training goes on."""
    one = learner(team, folder, config(), dtype=torch.float32)
    for write, follow in (
        (lambda: checkpoint.write(one, folder / "tiny" / "config.json" / "c", job_id=made.JOB, ledger_step=0), checkpoint.follow),
        (lambda: export.write(one.policy, folder / "tiny" / "config.json" / "v"), lambda _: export.follow(one.policy)),
    ):
        failed = False
        try:
            put(team, write, lambda follow=follow: follow(one))
        except OSError:
            failed = True
        assert failed == team.is_lead
    return gradient(one)


def put(team: Team, write: Callable[[], None], follow: Callable[[], None]) -> None:
    (write if team.is_lead else follow)()


SCENARIOS: dict[str, Callable[[Team, Path], Found]] = {
    each.__name__: each
    for each in (
        full,
        single_precision,
        adapters_and_reference,
        adapters_written,
        padded_with_reference,
        autocast,
        mapped,
        written,
        disk_full,
    )
}

if __name__ == "__main__":
    process.make_deterministic()
    place = Path(sys.argv[1])
    second = join(1, 2, meeting=place / "meeting", device="cpu")
    for scenario in SCENARIOS.values():
        scenario(second, place)
