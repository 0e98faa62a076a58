"""The laws of the fleet simulator can be broken, and say so."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.domain.seal import Seal
from simulator.fleet.laws import MOVES, Laws, State
from simulator.fleet.money import Purse
from simulator.fleet.run import Run
from simulator.fleet.worker import FleetWorker
from simulator.laws import LawBroken
from tests.unit.simulator.test_fleet_run import scenario


def worker(price_uusd: int = 0) -> FleetWorker:
    one = FleetWorker(0, 0, slots=2, generation_s=10.0, apply_s=1.0, idles=False, price_uusd=price_uusd)
    one.begin(0.0)
    return one


def issued(count: int, bound: int = 2) -> Laws:
    laws = Laws(groups_per_step=1, bound=bound)
    for number in range(count):
        laws.issued(number)
    return laws


def test_a_grant_past_the_gate() -> None:
    """t + (n + g - 1) // B > x + S."""
    laws = Laws(groups_per_step=4, bound=1)
    laws.granted(3, 7, 1, 3, worker())
    with pytest.raises(LawBroken, match="were granted to version 3"):
        laws.granted(3, 8, 1, 3, worker())


@pytest.mark.parametrize("field", ["active", "alive", "known"])
def test_a_grant_to_nobody(field: str) -> None:
    """Dead, gone or not active."""
    one = worker()
    setattr(one, field, False)
    with pytest.raises(LawBroken, match="is not active and alive"):
        issued(0).granted(0, 0, 1, 0, one)


def test_numbers_rise_by_one() -> None:
    """None is left out, none comes twice."""
    with pytest.raises(LawBroken, match="group 3 was issued after 1"):
        issued(2).issued(3)


@pytest.mark.parametrize("before", list(State))
@pytest.mark.parametrize("after", list(State))
def test_only_legal_ways(before: State, after: State) -> None:
    """From each state to each; and never from a state that the group is not in."""
    laws = issued(1)
    path = {State.ISSUED: [], State.READY: [State.READY], State.SEALED: [State.READY, State.SEALED]}
    path |= {State.TRAINED: [*path[State.SEALED], State.TRAINED], State.REJECTED: [State.REJECTED]}
    at = State.ISSUED
    for following in path[before]:
        laws.moved(0, at, following)
        at = following
    if (before, after) in MOVES:
        laws.moved(0, before, after)
        assert laws.by_state[after] == 1
        return
    with pytest.raises(LawBroken, match="group 0 went from"):
        laws.moved(0, before, after)


def test_a_seal_that_trains_what_is_too_old_or_lies() -> None:
    """Staleness, step, size and histogram."""
    with pytest.raises(LawBroken, match="a batch of step 1 was sealed, the next is 0"):
        issued(1).sealed(Seal((0,), False, (), (), {0: 1}), {0: 1}, 1)
    laws = issued(9)
    for number in range(9):
        laws.moved(number, State.ISSUED, State.READY)
    for step in range(3):
        laws.sealed(Seal((step,), False, (), (), {0: 1}), {step: step}, step)
    with pytest.raises(LawBroken, match="group 3 has staleness 3 in step 3, S = 2"):
        laws.sealed(Seal((3,), False, (), (), {3: 1}), {3: 0}, 3)
    laws = issued(2)
    for number in range(2):
        laws.moved(number, State.ISSUED, State.READY)
    with pytest.raises(LawBroken, match="step 0 has 2 groups"):
        laws.sealed(Seal((0, 1), False, (), (), {0: 2}), {0: 0, 1: 0}, 0)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda run: setattr(run.board.counts, "accepted", run.board.counts.accepted + 1), "completions leased"),
        (lambda run: run.board.unsettled.popitem(), "groups issued"),
        (lambda run: setattr(next(iter(run.board.open.values())), "left", 99), "lacks 99"),
        (lambda run: setattr(next(one for one in run.workers if one.leases), "known", False), "is gone for the coordinator"),
        (lambda run: setattr(run.purse, "price_sum", run.purse.price_sum + 1), "one by one"),
        (lambda run: setattr(run.purse, "limit_uusd", 1), "are spent and the budget is 1"),
    ],
)
def test_counters_that_drift_are_found(harm: object, message: str) -> None:
    """One wrong row or counter, and the full check names it."""
    run = Run(scenario(hours=0.3))
    run.run()
    run.laws.in_full(run.board, run.workers, run.purse, run.now)
    harm(run)  # type: ignore[operator]
    with pytest.raises(LawBroken, match=message):
        run.laws.in_full(run.board, run.workers, run.purse, run.now)


def test_a_worker_that_is_forgotten() -> None:
    """The gate is open for its version, and it waits all the same."""
    run = Run(scenario(hours=0.3))
    run.run()
    newest = worker()
    newest.version = run.board.newest
    run.board.unsettled.clear()
    with pytest.raises(LawBroken, match="could be given work"):
        run.laws.nobody_starves(run.board, [newest])


@given(
    intervals=st.lists(
        st.tuples(st.integers(0, 5_000_000), st.integers(0, 86_400_000), st.integers(0, 86_400_000)), min_size=1, max_size=30
    ),
    learner=st.integers(0, 10_000_000),
    now=st.integers(86_400_000, 200_000_000),
)
def test_running_totals_are_the_sum_over_workers(intervals: list[tuple[int, int, int]], learner: int, now: int) -> None:
    """Ended intervals are floored one by one, open ones once; all times in ms."""
    purse, workers, ended, still_open = Purse(learner, None), [], 0, 0
    for place, (price, first, second) in enumerate(intervals):
        one = worker(price)
        one.paid_from = min(first, second) / 1000
        purse.begin(one)
        workers.append(one)
        if place % 2:
            purse.end(one, max(first, second) / 1000)
            ended += price * (int(max(first, second) / 1000 * 1000) - int(min(first, second) / 1000 * 1000)) // 3_600_000
        else:
            still_open += price * (int(now / 1000 * 1000) - int(min(first, second) / 1000 * 1000))
    purse.check(workers, now / 1000)
    exact = ended + still_open // 3_600_000 + purse.learner(now / 1000)
    assert purse.spent(now / 1000) == exact
