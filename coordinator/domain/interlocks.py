"""Interlocks between how a job is set and what the learner's figures say about it: pure.

A few figures tell that data has become too old, or that training goes wrong or does nothing, before the reward does. A figure must be
past its limit for some steps in a row (its patience); then an alarm is raised, and again every REMIND_EVERY steps while it stays there.
None of them stops a job: they say what is seen and what would help. Where the job allows it, alarms of drift lower S by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

PATIENCE: Final = 3
REMIND_EVERY: Final = 10
LEAST_EFFECTIVE_SAMPLES: Final = 0.9
MOST_MISMATCH_KL: Final = 0.1
MOST_LOGPROB_GAP: Final = 0.1
LEAST_ENTROPY_LEFT: Final = 0.1
LEAST_BOUND: Final = 1  # automatic reduction does not make a job synchronous: that is for people to decide

EFFECTIVE_SAMPLES: Final = "effective_sample_size"
MISMATCH_KL: Final = "mismatch_kl/all/mean"
LOGPROB_GAP: Final = "logprob_gap/all/mean"
OLDEST: Final = "off_policy/max"
ENTROPY: Final = "entropy/all/mean"
APPLIED: Final = "optim/applied"
TRUNCATED: Final = "is_truncated/all/mean"
UNSCORED: Final = "unscored/mean"
ALIKE: Final = "zero_variance/mean"
GUARDED: Final = "is_guarded/mean"
WATCHED: Final = (EFFECTIVE_SAMPLES, MISMATCH_KL, LOGPROB_GAP, OLDEST, ENTROPY, APPLIED, TRUNCATED, UNSCORED, ALIKE, GUARDED)

Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Alarm:
    """What is wrong; `is_drift`: fresher data would help."""

    code: str
    words: str
    is_drift: bool = False


def alarms(recent: Sequence[Figures], *, step: int, first_entropy: float | None, bound: int) -> tuple[Alarm, ...]:
    """What to say after `step`.

    Args:
        recent: figures of the newest steps, newest last, up to PATIENCE + 1 of them; a figure that was not measured is absent.
        step: the newest step.
        first_entropy: nats, of the job's first step; None where it was not measured.
        bound: the job's S.
    """
    floor = LEAST_ENTROPY_LEFT * (first_entropy or 0.0)
    found = []
    if _is_due(recent, _samplers_disagree, step, patience=1):
        found.append(_disagreement(recent[-1][LOGPROB_GAP]))
    if _is_due(recent, lambda figures: figures.get(EFFECTIVE_SAMPLES, 1.0) < LEAST_EFFECTIVE_SAMPLES, step):
        found.append(_few_samples(recent[-1][EFFECTIVE_SAMPLES], bound))
    if _is_due(recent, lambda figures: figures.get(MISMATCH_KL, 0.0) > MOST_MISMATCH_KL, step):
        found.append(_mismatch(recent[-1][MISMATCH_KL], bound))
    if _is_due(recent, lambda figures: figures.get(ENTROPY, floor) < floor, step):
        found.append(_collapse(recent[-1][ENTROPY], floor))
    if _is_due(recent, lambda figures: figures.get(APPLIED, 1.0) == 0.0, step):
        found.append(_nothing_trained(recent[-1]))
    return tuple(found)


def reduced_bound(found: Sequence[Alarm], *, bound: int, is_allowed: bool) -> tuple[int, str] | None:
    """The lower S that the alarms call for, and why; None: it stays."""
    drifting = [alarm.code for alarm in found if alarm.is_drift]
    if not drifting or not is_allowed or bound <= LEAST_BOUND:
        return None
    return bound - 1, f"staleness.auto_reduce: {' and '.join(drifting)} at S = {bound}, so S is {bound - 1} from the next seal on"


def _is_due(recent: Sequence[Figures], is_past: Callable[[Figures], bool], step: int, *, patience: int = PATIENCE) -> bool:
    """Past its limit for `patience` steps: since just now, or for longer and it is time to say so again."""
    past = [is_past(figures) for figures in recent]
    if len(past) < patience or not all(past[-patience:]):
        return False
    has_just_begun = len(past) == patience or not past[-patience - 1]
    return has_just_begun or step % REMIND_EVERY == 0


def _samplers_disagree(figures: Figures) -> bool:
    """On data of the current version alone, where age explains nothing."""
    return figures.get(OLDEST) == 0.0 and figures.get(LOGPROB_GAP, 0.0) > MOST_LOGPROB_GAP


def _disagreement(value: float) -> Alarm:
    words = (
        f"log-probs of samplers and learner differ by {value:.3f} nats a token on data of the current version, over "
        f"{MOST_LOGPROB_GAP:g}: an engine applies another temperature, a filter, or other weights. Look at its workers' canaries and dtype"
    )
    return Alarm("samplers_disagree", words)


def _few_samples(value: float, bound: int) -> Alarm:
    words = (
        f"the effective sample size is {value:.2f} of the trained tokens, under {LEAST_EFFECTIVE_SAMPLES:g} for {PATIENCE} steps: "
        f"a few tokens carry the step. {_fresher(bound)}"
    )
    return Alarm("low_effective_sample_size", words, is_drift=True)


def _mismatch(value: float, bound: int) -> Alarm:
    words = (
        f"the mismatch KL between samplers and learner is {value:.3f} nats a token, over {MOST_MISMATCH_KL:g} for {PATIENCE} steps: "
        f"the data is far from the policy. {_fresher(bound)}"
    )
    return Alarm("high_mismatch_kl", words, is_drift=True)


def _collapse(value: float, floor: float) -> Alarm:
    words = (
        f"the entropy is {value:.3f} nats a token, under {LEAST_ENTROPY_LEFT:.0%} of the first step's ({floor:.3f}) for {PATIENCE} steps: "
        "the policy hardly explores any more. Lower algorithm.learning_rate, or set algorithm.reference_kl"
    )
    return Alarm("entropy_collapse", words)


def _nothing_trained(figures: Figures) -> Alarm:
    words = (
        f"{PATIENCE} steps changed no weight: {figures.get(TRUNCATED, 0.0):.0%} of the rollouts hit the length cap, "
        f"{figures.get(UNSCORED, 0.0):.0%} have no score, in {figures.get(ALIKE, 0.0):.0%} of the groups all rewards are equal, "
        f"{figures.get(GUARDED, 0.0):.0%} of the trained rollouts have an absurd ratio. Raise sampling.max_new_tokens or set "
        "algorithm.truncated to 'keep'; check the reward; choose prompts of another difficulty; with absurd ratios look at the "
        "workers' canaries"
    )
    return Alarm("nothing_trained", words)


def _fresher(bound: int) -> str:
    if bound <= LEAST_BOUND:
        return "Lower algorithm.learning_rate; if it stays, a worker's engine computes other log-probs than the learner"
    return f"Lower staleness.max ({bound} now), or algorithm.learning_rate; staleness.auto_reduce does the first by itself"
