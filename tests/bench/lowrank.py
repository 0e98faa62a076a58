"""Bytes of a LoRA version: its delta and its low-rank edge, by learning rate, and GB/s of both: `python -m tests.bench lowrank [--json]`.

Real learner steps on a small batch of random tokens (AdamW moves each factor by about the learning rate, whatever the gradient), real
publications, the product's codecs. Seconds are of this process's CPU, one thread, GB of bf16 model bytes, without hashing. `--smollm2`
takes SmolLM2-135M (`tests/models/smollm2.py`) instead of the learner bench's model of 3.5 million parameters: minutes.
"""

from __future__ import annotations

import json as json_module
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coordinator.learner import export, model, step
from coordinator.learner.batch_file import Batch
from coordinator.learner.model import Policy
from coordinator.learner.process import make_deterministic
from coordinator.wire.job import JobConfig
from p2p.adapters.adapter_dir import open_adapter
from p2p.adapters.snapshot_dir import Snapshot, open_snapshot
from p2p.codec.delta import Delta
from p2p.codec.encodings import Encoding
from p2p.codec.layout import Base, Bytes, Shard, gather, shards, view
from p2p.codec.lowrank import LowRank
from tests.bench.learner import write_model
from tests.models import smollm2 as real_model

RATES = (1e-5, 1e-4, 1e-3)
RANK, ALPHA = 16, 32
ROLLOUTS, PROMPT, COMPLETION = 8, 16, 16


def main(json: bool = False, smollm2: bool = False, steps: int = 6) -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory(prefix="bench-lowrank-") as folder:
        place = Path(folder)
        found = [measure(place, _model(place, is_real=smollm2), rate, steps) for rate in RATES]
    if json:
        print(json_module.dumps(found))
        return
    names = (
        "rate",
        "parameters",
        "single",
        "chain",
        "lowrank",
        "factors",
        "single_apply",
        "lowrank_apply",
        "single_encode",
        "lowrank_encode",
    )
    print("".join(f"{name:>16}" for name in names))
    for figures in found:
        print("".join(f"{figures[name]:>16,.5g}" for name in names), flush=True)


def _model(place: Path, *, is_real: bool) -> Path:
    if is_real:
        return real_model.directory()
    if not (place / "model").is_dir():
        write_model(place / "model")
    return place / "model"


def measure(place: Path, directory: Path, rate: float, steps: int) -> dict[str, float]:
    """One learning rate: the last step's delta, all deltas together, and the edge from version 0 to the last version."""
    learner = _learner(directory, rate)
    versions = place / "versions"
    shutil.rmtree(versions, ignore_errors=True)
    export.write(learner.policy, versions / "0")
    chain = 0
    for number in range(steps):
        figures = step.take_step(learner, batch_of(number, learner.policy))
        if not figures["optim/applied"]:
            raise AssertionError(f"step {number} was not applied: there is nothing to measure")
        export.write(learner.policy, versions / str(number + 1))
        before, after = (open_snapshot(versions / str(one)) for one in (number, number + 1))
        single, encode_s = encoded(Delta("dense"), before, after)
        chain += len(single)
        if number > 0:
            shutil.rmtree(versions / str(number))
    first, last = open_snapshot(versions / "0"), open_snapshot(versions / str(steps))
    edge = open_adapter(versions / str(steps))
    lowrank, lowrank_s = encoded(edge, first, last)
    gigabytes = sum(one.nbytes for one in last.tensors) / 1e9
    return {
        "rate": rate,
        "parameters": sum(one.nbytes for one in last.tensors) / 2,
        "single": len(single),
        "chain": chain,
        "lowrank": len(lowrank),
        "factors": sum(each.up.nbytes + each.down.nbytes for each in edge.factors.values()),
        "single_encode": gigabytes / encode_s,
        "lowrank_encode": gigabytes / lowrank_s,
        "single_apply": gigabytes / applied(Delta(), single, before, after),
        "lowrank_apply": gigabytes / applied(LowRank(), lowrank, first, last),
    }


def encoded(encoding: Encoding, base: Snapshot, new: Snapshot) -> tuple[bytes, float]:
    """The edge, and the CPU seconds of making it (the low-rank one: of proving it, too); the loops are compiled before."""
    plan = shards(new.tensors)

    def work() -> bytes:
        stream = ((shard, gather(shard, new.read)) for shard in plan)
        return b"".join(bytes(view(chunk)) for chunk in encoding.encode(stream, _reader(base)))

    work()
    return timed(work)


def applied(encoding: Encoding, edge: bytes, base: Snapshot, new: Snapshot) -> float:
    """CPU seconds of decoding; the result is compared."""
    plan = shards(new.tensors)

    def work() -> Iterable[Bytes]:
        return list(encoding.decode([edge], plan, _reader(base)))

    _checked(zip(plan, work(), strict=True), new)
    return timed(work)[1]


def _checked(found: Iterator[tuple[Shard, Bytes]], new: Snapshot) -> None:
    if not all(np.array_equal(data, gather(shard, new.read)) for shard, data in found):
        raise AssertionError("the edge does not lead to the version")


def _reader(snapshot: Snapshot) -> Base:
    return lambda shard: gather(shard, snapshot.read)


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """A result, and the CPU seconds of the best of three runs."""
    taken = []
    for _ in range(3):
        begun = time.process_time()
        result = work()
        taken.append(time.process_time() - begun)
    return result, min(taken)


def _learner(directory: Path, rate: float) -> step.Learner:
    make_deterministic()
    config = {
        "name": "bench",
        "model": "m",
        "environment": {"type": "digit_sort"},
        "algorithm": {"group_size": 4, "groups_per_step": 2, "learning_rate": rate, "truncated": "keep"},
        "lora": {"rank": RANK, "alpha": ALPHA},
        "sampling": {"max_new_tokens": COMPLETION},
        "budget": {"steps": 1},
    }
    torch.manual_seed(1)
    return step.start(model.load(directory), JobConfig.model_validate(config))


def batch_of(number: int, policy: Policy) -> Batch:
    """Two groups of four, all lengths alike, sampled by the policy itself as far as its log-probs say; every group has signal."""
    draw = np.random.default_rng(number)
    tokens = ROLLOUTS * COMPLETION
    ids = torch.from_numpy(draw.integers(2, policy.vocab_size, (ROLLOUTS, PROMPT + COMPLETION)))
    with torch.no_grad():
        every = torch.log_softmax(policy.model(input_ids=ids, use_cache=False).logits[:, PROMPT - 1 : -1].float(), dim=-1)
    logprobs = every.gather(2, ids[:, PROMPT:, None])[:, :, 0]
    return Batch(
        step=number,
        prompt_ids=ids[:, :PROMPT].reshape(-1).numpy().astype(np.int32),
        prompt_lengths=np.full(ROLLOUTS, PROMPT, np.int32),
        token_ids=ids[:, PROMPT:].reshape(-1).numpy().astype(np.int32),
        lengths=np.full(ROLLOUTS, COMPLETION, np.int32),
        logprobs=logprobs.reshape(-1).numpy(),
        versions=np.full(tokens, number, np.int32),
        rewards=np.tile([0.0, 1.0], ROLLOUTS // 2).astype(np.float32),
        group=np.repeat(np.arange(2), 4).astype(np.int32),
        truncated=np.zeros(ROLLOUTS, np.uint8),
        weight=np.ones(ROLLOUTS, np.float32),
        sampled=np.ones(tokens, np.bool_),
    )
