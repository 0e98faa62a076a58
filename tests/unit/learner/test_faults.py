"""One test for each fault of other systems that a learner can have; the numbers are those of docs/faults.md.

Each test first makes the situation in which the fault shows, then holds the right figure against what is done here.
"""

from __future__ import annotations

import ctypes
import gc
import math
import resource
import shutil
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from coordinator.domain import interlocks
from coordinator.learner import batch_file, collate, export, metrics, model, step
from coordinator.learner.batch_file import Batch
from coordinator.learner.errors import BatchInvalid
from coordinator.learner.session import Session
from coordinator.wire.job import LOSS_FIELDS
from coordinator.wire.learner_link import Failed, Log, Ready, Snapshot, Snapshotted, Start, Train, Trained
from coordinator.wire.messages import SamplingParameters
from worker_node.adapters.engine import Finished, Weights
from worker_node.adapters.engine_torch import TorchEngine, TorchOptions
from worker_node.domain.generation import Completion, GenerationRequest


def learner(made: ModuleType, tiny: Path, **given: Any) -> step.Learner:
    return step.start(model.load(tiny), made.config(**given))


def gradient(one: step.Learner, batch: Batch, parts: list[list[int]] | None = None) -> list[torch.Tensor]:
    signal = collate.signal_of(batch, one.config)
    one.optimizer.zero_grad(set_to_none=True)
    for rows in parts or [list(range(batch.rollouts))]:
        step.accumulate(one, collate.collate(batch, signal, rows), metrics.Tally())
    return [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for parameter in one.policy.model.parameters()
    ]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).norm()) <= 1e-5 * float(other.norm()) + 1e-9


def own_logprobs(one: step.Learner, batch: Batch, temperature: float) -> np.ndarray:
    signal = collate.signal_of(batch, one.config)
    rows = []
    with torch.no_grad():
        for row in range(batch.rollouts):
            rows.append(step.token_logprobs(one.policy, collate.collate(batch, signal, [row]), temperature)[0][0].numpy())
    return np.minimum(np.concatenate(rows), 0).astype(np.float32)


@pytest.mark.parametrize("version", [-1, 4])
def test_fault_03_a_version_that_cannot_be_is_an_error_not_a_pass(made: ModuleType, tmp_path: Path, version: int) -> None:
    """Step 3 cannot hold tokens of version 4 (staleness -1), nor of none: filters of the form "lag <= S" would let both pass."""
    arrays = made.arrays(step=3)
    arrays["versions"] = np.full_like(arrays["versions"], version)
    path = tmp_path / "batch"
    path.write_bytes(made.file_bytes(arrays, step=3))
    with pytest.raises(BatchInvalid, match="versions"):
        batch_file.read(
            path, digest=batch_file.blake3(path.read_bytes()).hexdigest(), job_id=made.JOB, step=3, vocab_size=made.VOCAB
        )


@pytest.mark.parametrize("advantage", ["mean", "group_std", "leave_one_out", "batch_std"])
def test_fault_05_a_slot_that_failed_leaves_the_baseline_of_the_others_alone(made: ModuleType, tiny: Path, advantage: str) -> None:
    """The group of three scores trains as if the fourth had never been asked for; a group with one score trains nothing."""
    one = learner(made, tiny, advantage=advantage)
    lost = made.batch(rewards=np.array([1, 0, math.nan, 0, math.nan, 1, math.nan, math.nan], np.float32))
    signal = collate.signal_of(lost, one.config)
    without = replace(
        lost, **{name: np.delete(getattr(lost, name), 2) for name in ("rewards", "group", "truncated", "weight", "lengths")}
    )
    assert signal.advantages[[0, 1, 3]].tolist() == pytest.approx(collate.signal_of(without, one.config).advantages[:3].tolist())
    assert signal.advantages[5] == 0.0


def test_fault_14_a_repeated_training_call_trains_once(made: ModuleType, tiny: Path, tmp_path: Path) -> None:
    """The coordinator asks again after a lost answer: the second call is refused and changes nothing."""
    session = Session()
    session.answer(Start(fence=1, job_id=made.JOB, config=made.config(), model_dir=str(tiny), checkpoint_dir=None))
    path, digest = made.sealed(tmp_path, 0)
    request = Train(fence=1, step=0, batch_path=str(path), batch_digest=digest)
    assert isinstance(session.answer(request), Trained)
    again = session.answer(request)
    assert isinstance(again, Failed)
    assert (again.code, again.fatal) == ("wrong_step", False)


def test_fault_15_an_error_of_the_scorer_is_not_a_reward_of_zero(made: ModuleType, tiny: Path) -> None:
    """NaN in, no baseline, no loss; as zero it would have moved the baseline of the whole group."""
    one = learner(made, tiny, advantage="mean")
    rewards = np.array([1, 1, math.nan, math.nan, 0, 1, 0, 1], np.float32)
    failed, zero = made.batch(rewards=rewards), made.batch(rewards=np.nan_to_num(rewards))
    assert collate.signal_of(failed, one.config).advantages[:4].tolist() == [0, 0, 0, 0]
    assert collate.signal_of(zero, one.config).advantages[:4].tolist() == [0.5, 0.5, -0.5, -0.5]
    figures = step.take_step(one, failed)
    assert figures["reward/all/mean"] == pytest.approx(4 / 6)
    assert figures["unscored/mean"] == 0.25


@pytest.mark.parametrize("loss", LOSS_FIELDS)
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "prompt_mean", "constant"])
def test_fault_19_the_scale_of_the_loss_does_not_depend_on_the_split(
    made: ModuleType, tiny: Path, loss: str, aggregation: str
) -> None:
    """One micro-batch, eight, and an uneven three give one gradient; averaging each micro-batch would scale it by up to 8."""
    one = learner(made, tiny, loss=loss, aggregation=aggregation)
    batch = made.batch()
    batch = replace(batch, logprobs=own_logprobs(one, batch, 1.0))
    whole = gradient(one, batch)
    assert any(float(each.norm()) > 0 for each in whole)
    assert_same(gradient(one, batch, [[row] for row in range(8)]), whole)
    assert_same(gradient(one, batch, [[7, 1], [0], [2, 3, 4, 5, 6]]), whole)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "prompt_mean", "constant"])
def test_fault_19_masked_tokens_leave_the_denominator_too(made: ModuleType, tiny: Path, aggregation: str) -> None:
    """A group of which two rollouts are masked gives the gradient of the batch that never held them, advantages being equal."""
    one = learner(made, tiny, aggregation=aggregation)
    batch = made.batch(rewards=np.array([1, 0, 0.5, 0.5, 1, 0, 0.5, 0.5], np.float32))
    batch = replace(batch, logprobs=own_logprobs(one, batch, 1.0))
    cut = replace(batch, truncated=np.array([0, 0, 1, 1, 0, 0, 1, 1], np.uint8))
    keep = np.array([True, True, False, False] * 2)
    tokens, prompts = np.repeat(keep, batch.lengths), np.repeat(keep, batch.prompt_lengths)
    smaller = Batch(
        step=batch.step,
        prompt_ids=batch.prompt_ids[prompts],
        **{name: getattr(batch, name)[tokens] for name in ("token_ids", "logprobs", "versions", "sampled")},
        **{name: getattr(batch, name)[keep] for name in ("prompt_lengths", "lengths", "rewards", "group", "truncated", "weight")},
    )
    assert_same(gradient(one, cut), gradient(one, smaller))


def test_fault_19_a_batch_without_a_trained_token_is_no_nan(made: ModuleType, tiny: Path) -> None:
    one = learner(made, tiny)
    figures = step.take_step(one, made.batch(truncated=np.ones(8, np.uint8)))
    assert all(math.isfinite(value) for value in figures.values())
    assert figures["optim/applied"] == 0.0


@pytest.mark.parametrize("name", ["logprobs", "versions"])
def test_fault_20_every_token_has_its_own_log_prob_and_version(made: ModuleType, name: str) -> None:
    """Ids of text that was encoded again have another count; a fallback that pads with zeros would hide it."""
    arrays = made.arrays()
    arrays[name] = arrays[name][:-1]
    with pytest.raises(BatchInvalid, match=rf"array {name} has \d+ entries, lengths adds up to"):
        batch_file.parse(made.file_bytes(arrays, step=3), job_id=made.JOB, step=3)


def test_fault_20_log_probs_of_other_tokens_are_said_at_once(made: ModuleType, tiny: Path) -> None:
    """Zeros where log-probs should be (probability 1), on data of the current version: age does not explain them."""
    one = learner(made, tiny)
    batch = made.batch(step=3)
    fresh = replace(batch, versions=np.full_like(batch.versions, 3))
    padded = step.take_step(one, replace(fresh, logprobs=np.zeros_like(batch.logprobs)))
    assert "samplers_disagree" in [alarm.code for alarm in interlocks.alarms([padded], step=3, first_entropy=None, bound=4)]
    assert padded["ratio/all/max"] < 1.0


def generated(weights: Weights, temperature: float, dtype: Any = "float32") -> list[Completion]:
    """Eight completions of one prompt, by the worker's engine."""
    engine = TorchEngine(TorchOptions(slots=8, dtype=dtype, device="cpu"))
    engine.load(weights)
    sampling = SamplingParameters(max_new_tokens=8, temperature=temperature, stop_token_ids=(1,))
    engine.admit([GenerationRequest(("lease", slot), (3, 4, 5), slot, sampling) for slot in range(8)])
    done: dict[int, Completion] = {}
    while engine.is_busy:
        done |= {out.key[1]: out.completion for out in engine.step() if isinstance(out, Finished)}
    engine.close()
    return [done[slot] for slot in range(8)]


def as_batch(made: ModuleType, completions: list[Completion]) -> Batch:
    lengths = np.array([each.length for each in completions], np.int32)
    return made.batch(  # type: ignore[no-any-return]
        step=0,
        prompt_ids=np.tile(np.array([3, 4, 5], np.int32), 8),
        prompt_lengths=np.full(8, 3, np.int32),
        token_ids=np.concatenate([each.token_ids for each in completions]),
        lengths=lengths,
        logprobs=np.concatenate([each.logprobs for each in completions]),
        versions=np.zeros(lengths.sum(), np.int32),
        rewards=np.array([1, 0] * 4, np.float32),
    )


@pytest.fixture(scope="module")
def bits(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """Version 0 as it is published."""
    directory = tmp_path_factory.mktemp("published") / "v0"
    export.write(model.load(tiny), directory)
    return Weights(version=0, digest="d0", directory=directory)


def test_fault_21_sampler_and_learner_mean_the_same_distribution(made: ModuleType, bits: Weights) -> None:
    """At temperature 0.6 and age 0 the ratios are 1: both sides divide by it before the log-probs. If one did not, they would
    be far from 1, and the first step would say so.
    """
    batch = as_batch(made, generated(bits, 0.6))
    right = step.take_step(step.start(model.load(bits.directory), made.config(temperature=0.6)), batch)
    assert right["logprob_gap/all/max"] < 1e-4
    assert right["ratio/all/mean"] == pytest.approx(1.0, abs=1e-4)
    wrong = step.take_step(step.start(model.load(bits.directory), made.config(temperature=1.0)), batch)
    assert wrong["logprob_gap/all/mean"] > interlocks.MOST_LOGPROB_GAP
    for figures, codes in ((right, []), (wrong, ["samplers_disagree"])):
        assert [alarm.code for alarm in interlocks.alarms([figures], step=0, first_entropy=None, bound=4)] == codes


def test_fault_22_log_probs_are_taken_in_float32_at_least(made: ModuleType, tiny: Path) -> None:
    """After the last hidden states of a bf16 model: a head or log-softmax in bf16 is off by up to 1 %."""
    one = learner(made, tiny)
    one.policy.model.to(torch.bfloat16)
    batch = made.batch()
    signal = collate.signal_of(batch, one.config)
    micro = collate.collate(batch, signal, [0])
    with torch.no_grad():
        logprobs, entropy = step.token_logprobs(one.policy, micro, 1.0)
        found = one.policy.model.base_model(input_ids=micro.input_ids, attention_mask=micro.attention_mask).last_hidden_state
        logits = found[0].double() @ one.policy.model.lm_head.weight.double().T
    assert (logprobs.dtype, entropy.dtype) == (torch.float32, torch.float32)
    places = range(int(batch.prompt_lengths[0]) - 1, micro.input_ids.shape[1] - 1)
    expected = [float(torch.log_softmax(logits[place], -1)[micro.input_ids[0, place + 1]]) for place in places]
    assert logprobs[0].tolist() == pytest.approx(expected, abs=1e-5)


def test_fault_22_the_gap_of_a_coarser_engine_is_measured(made: ModuleType, bits: Weights) -> None:
    """The correction works on what the engine really computed: bf16 shows as a mismatch, fp32 does not."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        one = step.start(model.load(bits.directory), made.config())
        found[dtype] = step.take_step(one, as_batch(made, generated(bits, 1.0, dtype)))["logprob_gap/all/mean"]
    assert found["float32"] < 1e-5 < found["bfloat16"]


def test_fault_23_figures_are_raw_before_any_filter_and_a_dead_run_says_so(made: ModuleType, tiny: Path) -> None:
    """A cap that cuts everything: rewards and lengths are those of all rollouts, nothing is trained, and the third step tells."""
    one = learner(made, tiny)
    seen = []
    for number in range(3):
        batch = made.batch(step=number, seed=number, truncated=np.ones(8, np.uint8), rewards=np.zeros(8, np.float32))
        batch = replace(batch, logprobs=own_logprobs(one, batch, 1.0))
        seen.append(step.take_step(one, batch))
        assert seen[-1]["seq_len/all/mean"] == pytest.approx(float(batch.lengths.mean()))
    assert (seen[-1]["reward/all/mean"], seen[-1]["trained_tokens"], seen[-1]["zero_variance/mean"]) == (0.0, 0.0, 1.0)
    assert interlocks.alarms(seen[:2], step=1, first_entropy=None, bound=4) == ()
    (alarm,) = interlocks.alarms(seen, step=2, first_entropy=None, bound=4)
    assert alarm.code == "nothing_trained"
    assert "100% of the rollouts hit the length cap" in alarm.words
    assert "in 100% of the groups all rewards are equal" in alarm.words


def test_fault_09_a_prompt_after_the_update_knows_nothing_of_the_old_weights(
    made: ModuleType, bits: Weights, tmp_path: Path
) -> None:
    """The same prompt as before, asked while completions of the old version still run: as an engine that never held that version."""
    export.write(model.load(made.model_directory(tmp_path / "other", seed=7)), tmp_path / "v1")
    newer = Weights(version=1, digest="d1", directory=tmp_path / "v1")
    sampling = SamplingParameters(max_new_tokens=8, temperature=1.0, stop_token_ids=())
    (before, running, after) = (GenerationRequest((name, 0), (3, 4, 5), 11, sampling) for name in ("before", "running", "after"))

    def done(engine: TorchEngine, steps: int = 99) -> dict[str, Completion]:
        found: dict[str, Completion] = {}
        while engine.is_busy and steps:
            found |= {out.key[0]: out.completion for out in engine.step() if isinstance(out, Finished)}
            steps -= 1
        return found

    engine, fresh = (TorchEngine(TorchOptions(slots=4, device="cpu")) for _ in range(2))
    engine.load(bits)
    fresh.load(newer)
    engine.admit([before])
    assert done(engine)["before"].versions.tolist() == [0] * 8
    engine.admit([running])
    done(engine, 3)
    engine.apply(newer, abort_running=False)
    engine.admit([after])
    fresh.admit([after])
    found, expected = done(engine), done(fresh)["after"]
    assert found["running"].versions.tolist() == [0] * 3 + [1] * 5
    assert found["after"].versions.tolist() == [1] * 8
    assert found["after"].token_ids.tolist() == expected.token_ids.tolist() != found["running"].token_ids.tolist()
    assert found["after"].logprobs == pytest.approx(expected.logprobs, abs=1e-5)


def test_fault_10_training_moves_what_is_sampled(made: ModuleType, tiny: Path, tmp_path: Path) -> None:
    """A reward for short completions, real sampling from each published version: the mean length must fall."""
    one = learner(made, tiny, loss="ppo_clip", advantage="group_std", learning_rate=0.02, truncated="keep")
    means = []
    for number in range(12):
        directory = tmp_path / f"v{number}"
        export.write(one.policy, directory)
        batch = as_batch(made, generated(Weights(version=number, digest=f"d{number}", directory=directory), 1.0))
        means.append(float(batch.lengths.mean()))
        versions, rewards = np.full(len(batch.token_ids), number, np.int32), -batch.lengths.astype(np.float32)
        step.take_step(one, replace(batch, step=number, versions=versions, rewards=rewards))
    assert float(np.mean(means[-3:])) < float(np.mean(means[:3])) - 1.0


def resident_bytes() -> int:
    """What this process holds once all that is free went back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.long
def test_fault_24_memory_does_not_grow_from_step_to_step(made: ModuleType, tiny: Path, tmp_path: Path) -> None:
    """Read, train, publish, log: a graph, a batch or a snapshot kept from each step would be tens of KiB a step."""
    session = Session()
    start = Start(
        fence=1,
        job_id=made.JOB,
        config=made.config(reference_kl=0.01),
        model_dir=str(tiny),
        checkpoint_dir=None,
        metrics_dir=str(tmp_path / "metrics"),
    )
    assert isinstance(session.answer(start), Ready)
    held = []
    for number in range(240):
        path, digest = made.sealed(tmp_path, number)
        trained = session.answer(Train(fence=1, step=number, batch_path=str(path), batch_digest=digest))
        assert isinstance(trained, Trained), trained
        session.answer(Log(fence=1, step=number, at=float(number), metrics=trained.metrics))
        assert isinstance(session.answer(Snapshot(fence=1, directory=str(tmp_path / "v"), canary_ids=(1, 2, 3))), Snapshotted)
        shutil.rmtree(tmp_path / "v")
        path.unlink()
        held.append(resident_bytes() if number % 40 == 39 else 0)
    seen = [each for each in held if each]
    assert seen[-1] - seen[1] < 160 * 10_240, [each >> 10 for each in seen]
