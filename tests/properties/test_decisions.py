"""Properties of single decisions: grant, seal, admission, groups, leases, publication."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.domain.admission import CompletionLimits, Submitted, check_completion, check_completions
from coordinator.domain.grant import grantable
from coordinator.domain.groups import is_zero_variance
from coordinator.domain.leases import groups_for
from coordinator.domain.publication import is_due, kappa, retired
from coordinator.domain.retry import delay_s
from coordinator.domain.seal import ReadyGroup, choose

steady = settings(max_examples=200, deadline=None, derandomize=True, database=None)
small = st.integers(0, 12)


@steady
@given(t=small, n=st.integers(0, 60), b=st.integers(1, 8), s=small, lag=small, left=st.integers(0, 10))
def test_the_grant_is_the_largest_that_the_rule_allows(t: int, n: int, b: int, s: int, lag: int, left: int) -> None:
    """g groups are allowed iff t + (n + g - 1) // B <= x + S, and the planned steps need them."""
    x = max(t - lag, 0)
    g = grantable(committed_steps=t, unsettled=n, groups_per_step=b, bound=s, held_version=x, planned_steps=t + left).groups

    def allowed(groups: int) -> bool:
        last = t + (n + groups - 1) // b
        return last <= x + s and last < t + left

    assert g >= 0
    assert g == 0 or allowed(g)
    assert not allowed(g + 1)


@steady
@given(t=small, b=st.integers(1, 8), s=small, lag=small, n=st.integers(0, 7), left=st.integers(1, 10))
def test_some_grant_is_possible_below_one_step(t: int, b: int, s: int, lag: int, n: int, left: int) -> None:
    """n < B and x >= t - S: at least one group, as long as steps remain."""
    n, x = min(n, b - 1), max(t - min(lag, s), 0)
    grant = grantable(committed_steps=t, unsettled=n, groups_per_step=b, bound=s, held_version=x, planned_steps=t + left)
    assert grant.groups >= 1


ready_groups = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 9), st.booleans()), unique_by=lambda item: item[0], max_size=24
)


@steady
@given(ready_groups, st.integers(0, 4), st.integers(1, 8), st.integers(0, 8), st.integers(0, 8))
def test_a_seal_keeps_its_promises(
    items: list[tuple[int, int, bool]], bound: int, per_step: int, limit: int, replaced: int
) -> None:
    """Bound kept, ascending, nothing in two places, replacements within their limit, signal before zero weight."""
    step = 9
    ready = [ReadyGroup(number, version, (0.0, 0.0 if dull else 1.0)) for number, version, dull in items]
    by_number = {group.number: group for group in ready}
    seal = choose(ready, step=step, bound=bound, groups_per_step=per_step, max_replacements=limit, replaced=replaced)
    rejected = dict(seal.rejected)
    stale = {n for n, g in by_number.items() if step - g.oldest_version > bound}
    assert {n for n, reason in rejected.items() if reason.startswith("stale:")} == stale
    replaced_now = len(rejected) - len(stale)
    assert replaced_now <= max(limit - replaced, 0)
    assert all(is_zero_variance(by_number[n].rewards) for n in set(rejected) - stale)
    if seal.groups is None:
        assert len(ready) - len(rejected) < per_step
        return
    assert list(seal.groups) == sorted(set(seal.groups))
    assert len(seal.groups) == per_step
    assert not set(seal.groups) & set(rejected)
    assert seal.staleness == dict(sorted(Counter(step - by_number[n].oldest_version for n in seal.groups).items()))
    assert max(seal.staleness) <= bound
    dull = {n for n in seal.groups if is_zero_variance(by_number[n].rewards)}
    assert set(seal.zero_weight) == dull
    assert seal.no_signal == bool(dull)
    left_out = set(by_number) - set(seal.groups) - set(rejected)
    if dull:
        assert all(is_zero_variance(by_number[n].rewards) for n in left_out)
        assert replaced_now == max(limit - replaced, 0)
    good = sorted(n for n in set(seal.groups) - dull)
    assert all(n > good[-1] or is_zero_variance(by_number[n].rewards) for n in left_out if good)


LIMITS = CompletionLimits(
    vocab_size=8,
    stop_token_ids=(1, 2),
    max_new_tokens=4,
    lease_version=5,
    last_step=7,
    bound=2,
    committed_steps=6,
    confirmed={5: "d5", 6: "d6"},
    claimed={5: "d5", 6: "d6", 7: "d7"},
    rolled_back=frozenset(),
    fastest_tokens_per_s=100.0,
)


@st.composite
def completions(draw: st.DrawFn) -> Submitted:
    """Sound and broken ones, in about equal number."""
    length = draw(st.integers(1, 5))
    ids = draw(st.lists(st.sampled_from([3, 3, 4, 4, 5, 1, 2, -1, 8]), min_size=length, max_size=length))
    if draw(st.booleans()):
        ids = [3] * (length - 1) + [1]
    logprobs = draw(
        st.lists(st.sampled_from([-1.0, -1.0, -1.0, -0.0, 0.5, float("nan"), float("-inf")]), min_size=length, max_size=length)
    )
    if draw(st.booleans()):
        logprobs = [-1.0] * length
    versions = draw(st.lists(st.sampled_from([4, 5, 5, 6, 7, 8]), min_size=length, max_size=length))
    if draw(st.booleans()):
        versions = [5] * length
    return Submitted(
        slot=draw(st.integers(0, 3)),
        token_ids=np.array(ids, np.int32),
        logprobs=np.array(logprobs, np.float32),
        versions=np.array(versions, np.int32),
        stop_reason=draw(st.sampled_from(["stop", "stop", "length"])),
        generate_s=draw(st.sampled_from([1.0, 1.0, 0.0])),
    )


def is_sound(done: Submitted) -> bool:
    """The rules of DESIGN 4.4 once more, token by token."""
    ids, logprobs, versions = done.token_ids.tolist(), done.logprobs.tolist(), done.versions.tolist()
    return (
        len(ids) <= 4
        and all(0 <= token < 8 for token in ids)
        and all(float("-inf") < value <= 0.0 for value in logprobs)
        and not any(token in (1, 2) for token in ids[:-1])
        and ((done.stop_reason == "stop") == (ids[-1] in (1, 2)))
        and (done.stop_reason == "stop" or len(ids) == 4)
        and versions == sorted(versions)
        and set(versions) <= {5, 6}
        and done.generate_s >= len(ids) / 100.0
    )


@steady
@given(st.lists(completions(), max_size=6))
def test_admission_agrees_with_the_plain_rules(done: list[Submitted]) -> None:
    """Single and batch form give the same verdicts, and accept exactly what the rules accept."""
    verdicts = [check_completion(one, LIMITS) for one in done]
    assert check_completions(done, LIMITS) == verdicts
    assert [verdict.accepted for verdict in verdicts] == [is_sound(one) for one in done]
    assert all(verdict.code and verdict.reason and verdict.blame for verdict in verdicts if not verdict.accepted)


@steady
@given(st.integers(-3, 100), st.integers(1, 16), st.integers(-3, 50))
def test_groups_for_is_whole_groups(free: int, size: int, grantable_now: int) -> None:
    """Never more than granted, never more than fit unless it is a single one; something whenever possible."""
    groups = groups_for(free, group_size=size, grantable=grantable_now)
    assert 0 <= groups <= max(grantable_now, 0)
    assert groups * size <= free or groups <= 1
    assert groups >= 1 or free <= 0 or grantable_now <= 0


@steady
@given(st.integers(0, 10), st.floats(0.01, 1e3), st.floats(0, 1e4), st.floats(0, 1e3))
def test_auto_kappa_is_the_smallest_that_satisfies_design_5(s: int, train_s: float, bcast: float, pause: float) -> None:
    """It fits, or it is the most that is allowed; one less would not fit (give or take rounding)."""
    most = max(1, s - 1)
    chosen = kappa("auto", bound=s, train_s=train_s, bcast_p95_s=bcast, pause_s=pause)
    assert 1 <= chosen <= most

    def fits(k: int, slack: float) -> bool:
        return k * train_s * slack >= bcast and pause <= 0.05 * k * train_s * slack

    assert chosen == most or fits(chosen, 1 + 1e-9)
    assert chosen == 1 or not fits(chosen - 1, 1 - 1e-9)


@steady
@given(st.integers(0, 8), st.one_of(st.just("auto"), st.integers(1, 9)), st.integers(1, 40))
def test_the_learner_never_runs_out_of_usable_versions(s: int, setting: int | str, steps: int) -> None:
    """Publishing whenever it is due, the newest version serves every next step (x + S >= t), and the last is public."""
    every = kappa(setting, bound=s, train_s=1.0, bcast_p95_s=99.0, pause_s=0.0)  # type: ignore[arg-type]
    published: int | None = None
    for t in range(steps + 1):
        if is_due(committed_steps=t, published=published, kappa=every, planned_steps=steps):
            published = t
        assert published is not None
        assert t <= published + s
    assert published == steps


@steady
@given(st.sets(small), st.sets(small), small)
def test_what_is_needed_is_never_retired(versions: set[int], needed: set[int], newest: int) -> None:
    """Law 3's retention: no version that a worker holds or is leased, nor the newest."""
    gone = retired(versions, held_or_leased=needed, newest=newest)
    assert set(gone) <= versions - needed - {newest}
    assert all(version < newest for version in gone)
    assert set(versions) - set(gone) - needed - {newest} == {v for v in versions - needed if v > newest}


@steady
@given(st.integers(0, 2000), st.floats(0.001, 10), st.floats(0.001, 1000), st.integers(0, 2**32))
def test_delays_stay_within_their_bounds(attempt: int, first_s: float, most_s: float, seed: int) -> None:
    """Finite for every attempt."""
    assert 0.0 <= delay_s(attempt, first_s=first_s, most_s=most_s, rng=Random(seed)) <= most_s
