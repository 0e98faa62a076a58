"""What a plan takes for true: each figure with its value, where it is from, and why.

A figure is "measured" (on a job with the same model, or on the model's files), "given" (by whoever asks) or "assumed": then its default
is computed here, from figures above it in `KNOWN`, and the reason says how. Nothing is assumed in silence.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from coordinator.wire.job import JobConfig

BYTES_PER_WEIGHT = 2.0  # bf16
PARAMETERS = 4e9  # of a model whose files and name tell nothing
KEYFRAME_SHARE = 0.667  # of the bf16 bytes: only exponents compress
DELTA_BYTES_PER_WEIGHT = 0.0076  # one step at a learning rate of 1e-6, models of 1 to 8 B parameters
RATE_GROWTH = 0.75  # a delta grows with the learning rate's power: 2.3 times for 3 times
DELTA_GROWTH = 0.68  # and with the number of steps that it spans
REBUILD_BYTES_PER_S = 1e9  # writing, coding and rebuilding a snapshot
APPLY_BYTES_PER_S = 5e9  # into an engine that stands still
LEARNER_TFLOPS = 400.0  # one H100 at 40 % of its peak
FLOPS = 8.0  # per parameter and token: 2 forward, 4 backward, 2 for activations computed again
TOKEN_BYTES = 8.0  # id and log-prob
_SIZE = re.compile(r"(?<![A-Za-z0-9.])(\d{1,4}(?:\.\d{1,3})?)[ _-]?([bBmM])(?![A-Za-z0-9])")


class PlanRefused(ValueError):
    """A question that cannot be planned for; the message names the field, its value and the fix."""


class Source(StrEnum):
    """Where a figure is from."""

    MEASURED = "measured"
    GIVEN = "given"
    ASSUMED = "assumed"


@dataclass(frozen=True, slots=True)
class Fact:
    """One figure."""

    value: float
    source: Source
    why: str


@dataclass(frozen=True, slots=True)
class _Known:
    """A figure that a plan needs: its unit, what it may be, and its default from the job and the figures before it."""

    unit: str
    least: float
    most: float
    default: Callable[[JobConfig, Mapping[str, float]], tuple[float, str]]
    is_above: bool = False  # `least` itself is not allowed

    def allows(self, value: float) -> bool:
        return math.isfinite(value) and self.least <= value <= self.most and not (self.is_above and value == self.least)

    @property
    def wanted(self) -> str:
        lower = f"above {self.least:g}" if self.is_above else f"from {self.least:g}"
        return f"{self.unit}, {lower} to {self.most:g}"


@dataclass(frozen=True, slots=True)
class Facts:
    """All figures of `KNOWN`, by name."""

    by_name: Mapping[str, Fact]

    def __getitem__(self, name: str) -> float:
        return self.by_name[name].value

    def delta_bytes(self, steps: int) -> float:
        """What one publication sends to a worker that holds the one `steps` updates before."""
        grown: float = self["delta_bytes"] * steps ** self["delta_growth"]
        return min(grown, self["keyframe_bytes"])

    @property
    def generation_s(self) -> float:
        """T_gen: mean seconds in which one rollout's tokens are sampled, in all its turns."""
        return (1 - self["placed_share"]) * self["mean_tokens"] / self["tokens_per_s"]

    @property
    def looks_s(self) -> float:
        """Mean seconds of one rollout outside the engine: the environment looks at each turn, or a reward at the only one."""
        return self["turns"] * self["grade_s"]


def settled_facts(job: JobConfig, *, given: Mapping[str, float], measured: Mapping[str, Fact]) -> Facts:
    """Given figures first, then measured ones, then the defaults. Raises PlanRefused."""
    for name in given:
        if name not in KNOWN:
            raise PlanRefused(f"there is no assumption {name!r:.80}: those that can be set are {', '.join(KNOWN)}")
    found: dict[str, Fact] = {}
    for name, known in KNOWN.items():
        if name in given:
            fact = Fact(float(given[name]), Source.GIVEN, "as given")
        elif name in measured:
            fact = measured[name]
        else:
            fact = Fact(*_assumed(known, job, {name: one.value for name, one in found.items()}))
        if not known.allows(fact.value):
            raise PlanRefused(f"{name} is {fact.value:g} ({fact.source}): give {known.wanted}")
        found[name] = fact
    if found["mean_tokens"].value > job.sampling.max_new_tokens:
        raise PlanRefused(
            f"mean_tokens is {found['mean_tokens'].value:g}, above sampling.max_new_tokens {job.sampling.max_new_tokens}:"
            " give at most that many"
        )
    if found["turns"].value > job.environment.max_turns:
        raise PlanRefused(
            f"turns is {found['turns'].value:g}, above environment.max_turns {job.environment.max_turns}: give at most that many"
        )
    return Facts(found)


def _assumed(known: _Known, job: JobConfig, found: Mapping[str, float]) -> tuple[float, Source, str]:
    value, why = known.default(job, found)
    return min(max(value, known.least), known.most), Source.ASSUMED, why


def _parameters(job: JobConfig, _found: Mapping[str, float]) -> tuple[float, str]:
    sizes = _SIZE.findall(job.model)
    if not sizes:
        return PARAMETERS, "the model's files cannot be read here and its name tells no size"
    number, unit = sizes[-1]
    return float(number) * (1e9 if unit in "bB" else 1e6), f"read out of the name {job.model!r:.80}"


def _train_s(job: JobConfig, found: Mapping[str, float]) -> tuple[float, str]:
    tokens = job.rollouts_per_step * (found["mean_tokens"] + found["prompt_tokens"])
    seconds = FLOPS * found["parameters"] * tokens / (found["learner_tflops"] * 1e12)
    return seconds, f"{FLOPS:g} FLOP a parameter and token, {tokens:.3g} tokens a step; measure it, or give --train-s"


def _keyframe_bytes(_job: JobConfig, found: Mapping[str, float]) -> tuple[float, str]:
    return KEYFRAME_SHARE * BYTES_PER_WEIGHT * found["parameters"], f"{KEYFRAME_SHARE:g} of the bf16 bytes"


def _delta_bytes(job: JobConfig, found: Mapping[str, float]) -> tuple[float, str]:
    rate = job.algorithm.learning_rate
    size = DELTA_BYTES_PER_WEIGHT * found["parameters"] * (rate / 1e-6) ** RATE_GROWTH
    return min(size, found["keyframe_bytes"]), f"{DELTA_BYTES_PER_WEIGHT:g} B a parameter at a learning rate of 1e-6, here {rate:g}"


def _turns(job: JobConfig, _found: Mapping[str, float]) -> tuple[float, str]:
    most = job.environment.max_turns
    return (1.0, "one completion a rollout") if most == 1 else ((1 + most) / 2, "half of environment.max_turns")


def _placed_share(job: JobConfig, _found: Mapping[str, float]) -> tuple[float, str]:
    if job.environment.max_turns == 1:
        return 0.0, "one completion a rollout"
    return 0.5, "an environment that says as much as the model"


def _bytes_down(_job: JobConfig, found: Mapping[str, float]) -> tuple[float, str]:
    """The lease of a turn carries the prompt and the record so far, which grows evenly."""
    turns = found["turns"]
    tokens = turns * found["prompt_tokens"] + (turns - 1) / 2 * found["mean_tokens"]
    if turns == 1:
        return 4.0 * tokens, "4 B a token of the prompt, with each completion"
    return 4.0 * tokens, "4 B a token: the prompt and the record so far, with each turn"


def _bytes_up(_job: JobConfig, found: Mapping[str, float]) -> tuple[float, str]:
    return TOKEN_BYTES * (1 - found["placed_share"]) * found["mean_tokens"], f"{TOKEN_BYTES:g} B a sampled token: id and log-prob"


def _constant(value: float, why: str) -> Callable[[JobConfig, Mapping[str, float]], tuple[float, str]]:
    return lambda _job, _found: (value, why)


def _bytes_over(speed: float, what: str) -> Callable[[JobConfig, Mapping[str, float]], tuple[float, str]]:
    return lambda _job, found: (BYTES_PER_WEIGHT * found["parameters"] / speed, f"{what} at {speed / 1e9:g} GB/s")


KNOWN: Mapping[str, _Known] = {
    "parameters": _Known("weights", 1.0, 1e13, _parameters),
    "mean_tokens": _Known(
        "tokens", 1.0, 131_072.0, lambda job, _: (job.sampling.max_new_tokens / 2, "half of sampling.max_new_tokens")
    ),
    "length_cv": _Known(
        "standard deviation over mean of the lengths", 0.0, 5.0, _constant(0.6, "log-normal, cut at max_new_tokens")
    ),
    "prompt_tokens": _Known("tokens", 0.0, 1e6, _constant(256.0, "a short question")),
    "turns": _Known("turns of a rollout", 1.0, 256.0, _turns),
    "placed_share": _Known("share of the tokens after a prompt that the environment places", 0.0, 0.999, _placed_share),
    "tokens_per_s": _Known(
        "tokens/s of one completion", 0.0, 1e5, _constant(40.0, "a full engine: 34 to 46 on an H100 and an RTX 4090"), is_above=True
    ),
    "slots": _Known(
        "completions at once of a worker, 0: its rate times T_gen", 0.0, 4096.0, _constant(0.0, "by Little's law, at least 1")
    ),
    "admitted": _Known(
        "share of a worker's completions that are admitted",
        0.0,
        1.0,
        _constant(1.0, "offers count admitted completions"),
        is_above=True,
    ),
    "no_signal": _Known("share of groups whose rewards are all alike", 0.0, 0.999, _constant(0.0, "every group teaches something")),
    "grade_s": _Known("s a turn", 0.0, 3600.0, _constant(0.5, "a rule that checks an answer")),
    "learner_tflops": _Known(
        "TFLOP/s that the learner reaches", 0.0, 1e7, _constant(LEARNER_TFLOPS, "one H100 at 40 %"), is_above=True
    ),
    "train_s": _Known("s a step", 0.0, 1e6, _train_s, is_above=True),
    "keyframe_bytes": _Known("bytes", 1.0, 1e14, _keyframe_bytes),
    "delta_bytes": _Known("bytes of a delta over one step", 1.0, 1e14, _delta_bytes),
    "delta_growth": _Known(
        "power of the steps that a delta spans", 0.0, 1.0, _constant(DELTA_GROWTH, "measured from 1 to 8 steps, models of 135 M")
    ),
    "snapshot_s": _Known(
        "s to write, code and rebuild a version, without its way", 0.0, 1e5, _bytes_over(REBUILD_BYTES_PER_S, "the bf16 bytes")
    ),
    "apply_s": _Known("s that an engine stands still for a version", 0.0, 1e5, _bytes_over(APPLY_BYTES_PER_S, "the bf16 bytes")),
    "load_s": _Known("s from the keyframe to a worker's first completion", 0.0, 1e5, _constant(120.0, "an engine that starts")),
    "seeder_mbps": _Known("Mbit/s up at the coordinator", 0.0, 1e7, _constant(1000.0, "a rented server"), is_above=True),
    "completion_bytes_up": _Known("bytes of a rollout", 0.0, 1e9, _bytes_up),
    "completion_bytes_down": _Known("bytes of a rollout", 0.0, 1e9, _bytes_down),
}
