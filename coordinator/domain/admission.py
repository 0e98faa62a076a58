"""The structural ring (DESIGN 4.4): what every submission must satisfy before anything of it is stored.

`check_lease` judges the submission as a whole, `check_completion` one completion; `check_completions` judges many and costs
a fraction per completion when all is well. Who is to blame and who is paid is part of the answer: work in time by the wall
that the coordinator can no longer use is rejected and paid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coordinator.domain.model import Lease, LeaseState
from coordinator.domain.staleness import last_step as last_step_of

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
# ln of the smallest float32 is -103.3: a token with less could not have been sampled, and its ratio to any policy overflows.
LOWEST_LOGPROB = -104.0


@dataclass(frozen=True, slots=True, eq=False)
class Submitted:
    """One completion as it arrived. Arrays are one-dimensional, of equal length T."""

    slot: int
    token_ids: Ints
    logprobs: Floats  # of the sampled tokens
    versions: Ints  # the policy version that made each token
    stop_reason: str  # stop | length
    generate_s: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Accepted or not, and when not: a stable code, words, whose fault it is, and whether the worker is paid."""

    slot: int
    accepted: bool
    code: str = ""
    reason: str = ""
    blame: str = ""  # worker | network | job | coordinator
    paid: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a whole submission is refused."""

    code: str
    reason: str
    blame: str
    paid: bool


@dataclass(frozen=True, slots=True)
class CompletionLimits:
    """What a completion is held against: the job, the lease and what the worker may claim."""

    vocab_size: int
    stop_token_ids: tuple[int, ...]
    max_new_tokens: int
    lease_version: int  # x: the oldest version a token may carry
    last_step: int  # of the lease: no token may carry a version after it
    bound: int  # S now (it may have been lowered since the grant)
    committed_steps: int
    confirmed: Mapping[int, str]  # version -> digest that this worker proved by canary
    claimed: Mapping[int, str]  # version -> digest in the submission's head
    rolled_back: frozenset[str]  # digests that a replay replaced
    fastest_tokens_per_s: float


def check_lease(
    lease: Lease | None,
    *,
    lease_id: str,
    worker_id: str,
    session_epoch: int,
    fence: int,
    committed_steps: int,
    now: float,
) -> Refused | None:
    """Why a submission under `lease_id` is refused as a whole; None when its completions are to be judged.

    Slots that this very lease settled before are duplicates: look for them first, they are no fault.
    """
    if lease is None:
        return Refused("unknown_lease", f"lease {lease_id} does not exist", "worker", False)
    if lease.worker_id != worker_id:
        return Refused("not_your_lease", f"lease {lease_id} belongs to another worker", "worker", False)
    if lease.session_epoch != session_epoch:
        words = f"lease {lease_id} was granted in session {lease.session_epoch}, this is session {session_epoch}"
        return Refused("old_session", f"{words}: ask for new leases after joining again", "worker", False)
    if lease.fence != fence:
        words = f"lease {lease_id} has fence {lease.fence}, the submission carries {fence}"
        return Refused("old_fence", f"{words}: send the fence of the grant", "worker", False)
    return _check_life(lease, committed_steps, now)


def _check_life(lease: Lease, committed_steps: int, now: float) -> Refused | None:
    if lease.state is LeaseState.EXPIRED or (now > lease.deadline and lease.state in (LeaseState.LIVE, LeaseState.DEAD)):
        words = f"lease {lease.id} ended at its wall deadline, {max(now - lease.deadline, 0.0):.1f} s ago"
        return Refused("lease_expired", words, "worker", False)
    if lease.state is LeaseState.DEAD or (lease.state is LeaseState.LIVE and committed_steps > lease.last_step):
        return _dead(lease, committed_steps)
    if lease.state is LeaseState.CANCELLED:
        paid = now <= lease.deadline  # as much as it was promised for
        return Refused("lease_closed", f"lease {lease.id} was cancelled: {lease.reason or 'the job ended'}", "job", paid)
    if lease.state is LeaseState.ABANDONED:
        words = f"lease {lease.id} was given up: {lease.reason or 'the worker was not heard of'}"
        return Refused("lease_closed", words, "network", False)
    if lease.state is LeaseState.DONE:
        return Refused("lease_closed", f"every slot of lease {lease.id} is settled", "worker", False)
    return None


def _dead(lease: Lease, committed_steps: int) -> Refused:
    """Dead by version, by a replay, or with its group: never the worker's fault."""
    code = "policy_rolled_back" if lease.reason.startswith("policy_rolled_back") else "lease_dead_by_version"
    words = f"version {lease.version} serves steps up to {lease.last_step}; {committed_steps} steps are committed"
    return Refused(code, f"lease {lease.id} is dead: {lease.reason or words}", "coordinator", True)


def check_completion(done: Submitted, limits: CompletionLimits) -> Verdict:
    """Judge one completion; the first thing that is wrong is named."""
    wrong = check_unneeded(done, limits) or _wrong_versions(done, limits) or _unusable(done, limits)
    if wrong is None:
        return Verdict(done.slot, True)
    return Verdict(done.slot, False, wrong.code, f"slot {done.slot}: {wrong.reason}", wrong.blame, wrong.paid)


def check_unneeded(done: Submitted, limits: CompletionLimits) -> Refused | None:
    """What the worker did wrong in work that nobody needs any more; None: it is paid all the same.

    Looked for before what is the coordinator's fault: who makes things up is not paid because they come too late to be used.
    """
    found = (check(done, limits) for check in (_wrong_shape, _wrong_values, _wrong_stop, _wrong_versions, _too_fast))
    return next((wrong for wrong in found if wrong is not None and wrong.blame == "worker"), None)


def _fault(code: str, reason: str) -> Refused:
    return Refused(code, reason, "worker", False)


def _wrong_shape(done: Submitted, limits: CompletionLimits) -> Refused | None:
    for name, array, dtype in (
        ("token_ids", done.token_ids, np.int32),
        ("logprobs", done.logprobs, np.float32),
        ("versions", done.versions, np.int32),
    ):
        if array.ndim != 1 or array.dtype != dtype:
            words = f"{name} is {array.dtype} of shape {list(array.shape)}; send one-dimensional {np.dtype(dtype)}"
            return _fault("wrong_type", words)
    length = len(done.token_ids)
    if not length == len(done.logprobs) == len(done.versions):
        words = f"{length} token ids, {len(done.logprobs)} log-probs and {len(done.versions)} versions; send equally many"
        return _fault("unequal_lengths", words)
    if not 1 <= length <= limits.max_new_tokens:
        return _fault("wrong_length", f"{length} tokens; 1 to {limits.max_new_tokens} (max_new_tokens) are allowed")
    return None


def _wrong_values(done: Submitted, limits: CompletionLimits) -> Refused | None:
    lowest, highest = int(done.token_ids.min()), int(done.token_ids.max())
    if lowest < 0 or highest >= limits.vocab_size:
        wrong = lowest if lowest < 0 else highest
        return _fault("outside_vocabulary", f"token id {wrong} is outside the vocabulary 0..{limits.vocab_size - 1}")
    least, most = float(done.logprobs.min()), float(done.logprobs.max())  # NaN passes through both
    if not np.isfinite(least) or not np.isfinite(most):
        return _fault("logprob_not_finite", "a log-prob is NaN or infinite; send that of the sampled token")
    if most > 0.0:
        return _fault("logprob_positive", f"log-prob {most:.6g} is above 0; a probability cannot exceed 1")
    if least < LOWEST_LOGPROB:
        words = f"log-prob {least:.6g} is below {LOWEST_LOGPROB:g}: no float32 probability is that small, so it was never sampled"
        return _fault("logprob_impossible", words)
    return None


def _wrong_stop(done: Submitted, limits: CompletionLimits) -> Refused | None:
    stops = _stop_places(done.token_ids, limits.stop_token_ids)
    length = len(done.token_ids)
    if stops is not None and stops < length - 1:
        return _fault("wrong_stop", f"a stop token stands at place {stops} of {length}; generation ends with the first one")
    if done.stop_reason == "stop":
        if stops is None:
            return _fault("wrong_stop", f"stop_reason is 'stop', but the last token {int(done.token_ids[-1])} is no stop token")
        return None
    if done.stop_reason != "length":
        return _fault("wrong_stop", f"stop_reason is {done.stop_reason!r}; send 'stop' or 'length'")
    if stops is not None:
        return _fault("wrong_stop", "stop_reason is 'length', but the last token is a stop token; send 'stop'")
    if length != limits.max_new_tokens:
        return _fault("wrong_stop", f"stop_reason is 'length' after {length} tokens; the cap is {limits.max_new_tokens}")
    return None


def _stop_places(token_ids: Ints, stop_token_ids: Sequence[int]) -> int | None:
    """Place of the first stop token; None when there is none."""
    first: int | None = None
    for stop in stop_token_ids:
        hits = token_ids == stop
        place = int(hits.argmax())
        if hits[place] and (first is None or place < first):
            first = place
    return first


def _wrong_versions(done: Submitted, limits: CompletionLimits) -> Refused | None:
    versions = done.versions
    if len(versions) > 1 and bool((versions[1:] < versions[:-1]).any()):
        return _fault("versions_decrease", "versions fall within the completion; an engine never goes back to older weights")
    oldest, newest = int(versions[0]), int(versions[-1])
    # Once more steps are committed than the lease serves, what still runs goes on into newer versions: late, but no fault.
    is_served = limits.committed_steps <= limits.last_step
    if oldest < limits.lease_version or (is_served and newest > limits.last_step):
        span = f"{limits.lease_version}..{limits.last_step}"
        return _fault("outside_lease", f"versions {oldest}..{newest} are outside the lease's {span}")
    for version in _distinct(versions):
        wrong = _wrong_claim(version, limits)
        if wrong is not None:
            return wrong
    return None


def _distinct(versions: Ints) -> list[int]:
    """The distinct versions of a non-decreasing array."""
    if versions[0] == versions[-1]:
        return [int(versions[0])]
    return [int(version) for version in np.unique(versions)]


def _wrong_claim(version: int, limits: CompletionLimits) -> Refused | None:
    claimed = limits.claimed.get(version)
    if claimed is None:
        return _fault("version_not_claimed", f"version {version} is not in the submission's digests; name its digest")
    if claimed in limits.rolled_back:
        words = f"version {version} ({claimed[:12]}) was published anew with other weights after a replay"
        return Refused("policy_rolled_back", words, "coordinator", True)
    confirmed = limits.confirmed.get(version)
    if confirmed is None:
        return _fault("version_not_confirmed", f"this worker never confirmed version {version}; confirm it by its canary first")
    if confirmed != claimed:
        words = f"version {version} is claimed as {claimed[:12]}, this worker confirmed {confirmed[:12]}"
        return _fault("wrong_digest", words)
    return None


def _unusable(done: Submitted, limits: CompletionLimits) -> Refused | None:
    oldest = int(done.versions[0])
    if limits.committed_steps <= last_step_of(oldest, limits.bound):
        return None
    words = f"version {oldest} serves steps up to {last_step_of(oldest, limits.bound)}"
    return Refused("stale", f"{words}; {limits.committed_steps} steps are committed", "coordinator", True)


def _too_fast(done: Submitted, limits: CompletionLimits) -> Refused | None:
    least_s = len(done.token_ids) / limits.fastest_tokens_per_s
    if done.generate_s >= least_s:  # false for NaN too
        return None
    words = f"{len(done.token_ids)} tokens in {done.generate_s:.6g} s; at least {least_s:.6g} s are possible"
    return _fault("too_fast", words)


def check_completions(completions: Sequence[Submitted], limits: CompletionLimits) -> list[Verdict]:
    """`check_completion` for each, in order: the same verdicts at a fraction of the cost when nothing is wrong."""
    if completions and _all_plain(completions, limits):
        return [Verdict(done.slot, True) for done in completions]
    return [check_completion(done, limits) for done in completions]


def _all_plain(completions: Sequence[Submitted], limits: CompletionLimits) -> bool:
    """Whether every completion is right in every respect, tested on all tokens at once. False says nothing."""
    if any(_wrong_shape(done, limits) for done in completions):
        return False
    ids = np.concatenate([done.token_ids for done in completions])
    logprobs = np.concatenate([done.logprobs for done in completions])
    versions = np.concatenate([done.versions for done in completions])
    ends = np.cumsum([len(done.token_ids) for done in completions])
    version = int(versions[0])
    return (
        int(ids.min()) >= 0
        and int(ids.max()) < limits.vocab_size
        and float(logprobs.max()) <= 0.0
        and float(logprobs.min()) >= LOWEST_LOGPROB
        and bool((versions == version).all())
        and limits.lease_version <= version <= limits.last_step
        and _wrong_claim(version, limits) is None
        and _unusable(completions[0], limits) is None
        and _stops_agree(completions, ids, ends, limits)
        and all(_too_fast(done, limits) is None for done in completions)
    )


def _stops_agree(completions: Sequence[Submitted], ids: Ints, ends: NDArray[np.int64], limits: CompletionLimits) -> bool:
    """Whether stop tokens stand exactly at the ends of the completions that say "stop", and the others fill the cap."""
    is_stop = np.zeros(len(ids), dtype=np.bool_)
    for stop in limits.stop_token_ids:
        is_stop |= ids == stop
    says_stop = [done.stop_reason == "stop" for done in completions]
    fills = all(
        stops or (done.stop_reason == "length" and len(done.token_ids) == limits.max_new_tokens)
        for stops, done in zip(says_stop, completions, strict=True)
    )
    at_ends = is_stop[ends - 1]
    return fills and int(is_stop.sum()) == sum(says_stop) and bool((at_ends == np.array(says_stop)).all())
