"""The rule for mixed workers, its special cases, the warning line, the binding term. Expected values worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.domain.capacity import (
    NEVER,
    Binding,
    assess,
    busy_share,
    chosen_kappa,
    group_s,
    last_completion_s,
    offered_rate,
    paper_rate,
    pause_s,
    required_rate,
    synchronous_share,
    warning_line,
)
from coordinator.domain.capacity_inputs import (
    CapacityError,
    CapacityInputs,
    Estimate,
    JobShape,
    Lengths,
    Loading,
    Transfer,
    WorkerCapacity,
)

EQUAL = Lengths((1.0,))


def worker(rate=1.0, *, slots=10, admitted=1.0, bcast=6.0, apply=0.0, loading=Loading.KEEP, name="w", sd=0.0) -> WorkerCapacity:
    return WorkerCapacity(name, slots, Estimate(rate, sd), Estimate(admitted), bcast, apply, loading)


def inputs(*workers, bound=3, kappa=1, train=10.0, bcast=6.0, grade=0.0, lengths=EQUAL, size=4, groups=5, no_signal=0.0):
    shape = JobShape(size, groups, bound, kappa, no_signal)
    return CapacityInputs(shape, train, bcast, grade, lengths, workers or (worker(),))


class TestRate:
    def test_required_is_r_over_t_train(self) -> None:
        """20 rollouts in 10 s; twice as many when half of the groups teach nothing; never more than one replacement each."""
        assert required_rate(inputs()) == 2.0
        assert required_rate(inputs(no_signal=0.2)) == 2.5
        assert required_rate(inputs(no_signal=0.5)) == 4.0
        assert required_rate(inputs(no_signal=1.0)) == 4.0

    def test_each_kind_of_worker_loses_its_own_pause(self) -> None:
        """kappa * T_train = 20 s: idle loses 6 of 20, background 1 of 20, abort 1 + 10 * (1 + cv^2) / 2 = 6 of 20."""
        idle = worker(2.0, loading=Loading.IDLE)
        keep = worker(1.0, apply=1.0, admitted=0.8)
        abort = worker(1.0, apply=1.0, loading=Loading.ABORT)
        mixed = inputs(idle, keep, abort, kappa=2)
        assert [pause_s(one, mixed) for one in mixed.workers] == [6.0, 1.0, 6.0]
        assert offered_rate(mixed, 2).value == pytest.approx(2.0 * 0.7 + 0.8 * 0.95 + 1.0 * 0.7)

    def test_aborting_loses_long_completions_more(self) -> None:
        """Lengths 0 and 2, cv 1: what runs at a random moment is 2 long, and half of it is done."""
        abort = worker(loading=Loading.ABORT)
        assert pause_s(abort, inputs(abort, lengths=Lengths((0.0, 2.0)))) == pytest.approx(10.0)

    def test_a_pause_beyond_the_period_gives_nothing(self) -> None:
        assert offered_rate(inputs(worker(bcast=12.0, loading=Loading.IDLE)), 1).value == 0.0

    def test_errors_add_up_as_independent(self) -> None:
        """sd 0.3 * 0.5 and 0.2 * 2 of one worker: sqrt(0.0225 + 0.16); two such workers: times sqrt 2."""
        one = WorkerCapacity("w", 4, Estimate(2.0, 0.3), Estimate(0.5, 0.2), 0.0)
        assert offered_rate(inputs(one, one), 1).sd == pytest.approx(math.sqrt(2 * 0.1825))

    @given(
        st.integers(1, 6),
        st.integers(1, 12),
        st.floats(1.0, 100.0),
        st.floats(0.0, 0.95),
        st.floats(0.2, 3.0),
        st.integers(1, 500),
    )
    def test_the_papers_rule_is_the_case_of_equal_idle_workers(self, count, kappa, train, share, margin, rollouts) -> None:
        """sum mu >= kappa R / (kappa T - T_bcast) says the same as the general rule, for any number of workers."""
        bcast = share * kappa * train
        wanted = paper_rate(rollouts_per_step=rollouts, train_s=train, bcast_s=bcast, kappa=kappa)
        fleet = [worker(margin * wanted / count, bcast=bcast, loading=Loading.IDLE)] * count
        told = inputs(*fleet, train=train, kappa=kappa, bound=kappa + 1, size=1, groups=rollouts)
        assert offered_rate(told, kappa).value / required_rate(told) == pytest.approx(margin, rel=1e-9)

    def test_the_papers_table(self) -> None:
        """Multiples of R / T_train at T_bcast / T_train of 0.25, 0.5, 1 and kappa 1, 2, 5, 10."""
        rows = {0.25: (1.33, 1.14, 1.05, 1.03), 0.5: (2.0, 1.33, 1.11, 1.05), 1.0: (math.inf, 2.0, 1.25, 1.11)}
        for ratio, expected in rows.items():
            found = [paper_rate(rollouts_per_step=1, train_s=1.0, bcast_s=ratio, kappa=kappa) for kappa in (1, 2, 5, 10)]
            assert found == pytest.approx(list(expected), abs=0.006)

    def test_a_starved_learner_publishes_less_often(self) -> None:
        """At 0.9 of the paper's rate with pauses of half a period: u = 0.9 / (1 - 0.1 * 0.5), above 0.9."""
        idle = worker(0.9 * 4.0, bcast=5.0, loading=Loading.IDLE)
        assert busy_share(inputs(idle), 1) == pytest.approx(0.9 / 0.95)
        assert busy_share(inputs(worker(1.8)), 1) == pytest.approx(0.9)
        assert busy_share(inputs(worker(9.0)), 1) == 1.0


class TestKappa:
    def test_it_is_the_publications_rule(self) -> None:
        """p95 of 25 s asks for 3; a pause of 2.0 s of half the rate asks for 1.0 / 0.05 / 10 = 2; S - 1 bounds both."""
        assert chosen_kappa(inputs(bcast=25.0, kappa="auto", bound=6)) == 3
        pausing = (worker(apply=2.0), worker(apply=0.0))
        assert chosen_kappa(inputs(*pausing, kappa="auto", bound=6)) == 2
        assert chosen_kappa(inputs(worker(loading=Loading.IDLE), kappa="auto", bound=6)) == 5
        assert chosen_kappa(inputs(kappa=4, bound=6)) == 4

    @pytest.mark.parametrize("bound", [0, 1, 2])
    def test_small_bounds_publish_each_step(self, bound: int) -> None:
        assert chosen_kappa(inputs(bcast=90.0, kappa="auto", bound=bound)) == 1


class TestWarningLine:
    def test_by_hand(self) -> None:
        """T_gen = 4 s * (1 + 3 / 8); 6 + 5.5 + 1 = 12.5 s are two steps of 10 s; 8 slots are less than a step's 20."""
        line = warning_line(inputs(worker(2.0, slots=8), grade=1.0), 1)
        assert (line.kappa, line.way, line.queue, line.bound) == (1, 2, 1, 3)

    def test_many_slots_are_a_queue(self) -> None:
        """100 slots hold five steps of 20; the way is one step."""
        line = warning_line(inputs(worker(50.0, slots=100)), 2)
        assert (line.way, line.queue, line.bound) == (1, 5, 7)

    def test_the_longest_of_a_group_counts(self) -> None:
        """One in ten is long: the p99 of a group of 4 is long, its mean is 1 - 0.9^4 of the way from short to long."""
        lengths = Lengths((0.5,) * 9 + (5.5,))
        one = worker(1.0, slots=10)
        told = inputs(one, lengths=lengths)
        assert group_s(one, told, kappa=1, share=0.99) == pytest.approx(10 * (5.5 + 0.3))
        assert group_s(one, told, kappa=1, share=None) == pytest.approx(10 * (0.5 + 5 * (1 - 0.9**4) + 0.3))

    def test_idle_workers_stand_still_on_the_way(self) -> None:
        """13 s of work span two periods of 10 s: two loads of 6 s."""
        one = worker(1.0, loading=Loading.IDLE)
        assert group_s(one, inputs(one), kappa=1, share=0.99) == pytest.approx(13 + 12)
        assert group_s(one, inputs(one), kappa=2, share=0.99) == pytest.approx(13 + 6)

    def test_aborting_workers_begin_again_or_never_end(self) -> None:
        """10 s fit into a period of 10 s, twice on the way; 10 s never end in a period of 9 s."""
        one = worker(1.0, loading=Loading.ABORT)
        assert group_s(one, inputs(one), kappa=1, share=0.99) == pytest.approx(13 + 10)
        assert group_s(one, inputs(one, train=9.0), kappa=1, share=0.99) == math.inf
        found = assess(inputs(worker(9.0, slots=90, loading=Loading.ABORT), worker(9.0), train=9.0, bound=6))
        assert found.line.way == NEVER
        assert "never" not in found.words
        assert "aborts at each publication" in found.words

    @pytest.mark.parametrize("bound", [0, 1])
    def test_s_0_and_1_are_always_outside(self, bound: int) -> None:
        """kappa is at least 1 and so is the way."""
        found = assess(inputs(worker(100.0, slots=1, bcast=0.0), bound=bound, bcast=0.0, train=1e6))
        assert found.line.bound == 2
        assert not found.inside


class TestSynchronous:
    def test_formula(self) -> None:
        """10 of 10 + 6 + 13 + 1 s."""
        assert synchronous_share(train_s=10.0, bcast_s=6.0, last_s=13.0, grade_s=1.0) == pytest.approx(1 / 3)

    def test_all_at_once(self) -> None:
        """20 slots, lengths all alike: one T_gen, and the way through the slots within a group."""
        assert last_completion_s(inputs(worker(2.0, slots=20))) == pytest.approx(10 * (1 + 3 / 20))

    def test_in_turns(self) -> None:
        """5 slots, 20 rollouts: 15 pass at 0.5 a second before the last 10 s."""
        assert last_completion_s(inputs(worker(0.5, slots=5))) == pytest.approx(30 + 10)

    def test_the_assessment_uses_it(self) -> None:
        found = assess(inputs(worker(2.0, slots=20), bound=0, grade=2.5))
        assert found.binding is Binding.SYNCHRONY
        assert found.kappa == 1
        assert found.utilisation == pytest.approx(10 / (10 + 6 + 11.5 + 2.5))


class TestBinding:
    @pytest.mark.parametrize(
        ("told", "binding", "word"),
        [
            (inputs(worker(1.9)), Binding.GENERATION, "1.9 rollouts/s, the learner needs 2"),
            (inputs(worker(2.5, loading=Loading.IDLE)), Binding.BROADCAST, "without the pauses"),
            (inputs(worker(2.5, slots=5), bound=2, bcast=30.0), Binding.STALENESS, "most of it is T_bcast"),
            (inputs(worker(2.5, slots=50), bound=2), Binding.STALENESS, "most of it is T_gen"),
            (inputs(worker(200.0, slots=100), bound=3), Binding.STALENESS, "5 steps' rollouts"),
            (inputs(worker(2.5, slots=5), bound=3), Binding.LEARNER, "1.25 times"),
        ],
    )
    def test_each_in_words(self, told: CapacityInputs, binding: Binding, word: str) -> None:
        found = assess(told)
        assert found.binding is binding
        assert word in found.words

    def test_headroom_and_certainty(self) -> None:
        """2.3 +- 0.1 is surely above 2; 2.3 +- 0.2 is not (2.3 - 1.645 * 0.2 < 2)."""
        assert assess(inputs(worker(2.3, sd=0.1))).is_sure
        unsure = assess(inputs(worker(2.3, sd=0.2)))
        assert not unsure.is_sure
        assert unsure.headroom == pytest.approx(1.15)

    def test_it_is_a_function_of_its_inputs(self) -> None:
        """A later publication with a slower broadcast: the same call, another answer; the first is untouched."""
        told = inputs(worker(2.5, slots=5), bound=3)
        before = assess(told)
        after = assess(replace(told, bcast_p95_s=26.0))
        assert (before.inside, after.inside) == (True, False)
        assert assess(told) == before


class TestLengths:
    def test_measured_are_relative(self) -> None:
        assert Lengths.measured([30.0, 10.0]).values == (0.5, 1.5)

    @pytest.mark.parametrize("sample", [[], [0.0], [math.nan], [-1.0, 3.0]])
    def test_nonsense_is_named(self, sample) -> None:
        with pytest.raises(CapacityError, match="lengths of"):
            Lengths.measured(sample)

    @pytest.mark.parametrize("cv", [0.2, 0.5, 1.0])
    def test_lognormal_has_its_moments(self, cv: float) -> None:
        """Mean 1 exactly; variance within what 512 quantiles keep of the tail."""
        lengths = Lengths.lognormal(cv)
        assert math.fsum(lengths.values) / len(lengths.values) == pytest.approx(1.0)
        assert math.sqrt(lengths.cv_squared) == pytest.approx(cv, rel=0.05)

    def test_the_cap_cuts(self) -> None:
        assert max(Lengths.lognormal(1.5).values) > 15
        assert max(Lengths.lognormal(1.5, cap=4.0).values) < 5

    @pytest.mark.parametrize(
        ("share", "count", "expected"), [(0.5, 1, 2.0), (0.51, 1, 3.0), (0.25, 2, 2.0), (1.0, 3, 4.0), (0.0, 1, 1.0)]
    )
    def test_quantile_of_longest(self, share, count, expected) -> None:
        """Four values; half of the single ones are at most 2, a quarter of the pairs."""
        assert Lengths((1.0, 2.0, 3.0, 4.0)).quantile_of_longest(share, count) == expected

    def test_mean_of_longest(self) -> None:
        """Of two throws of (1, 3): 1 in a quarter of the cases."""
        assert Lengths((1.0, 3.0)).mean_of_longest(2) == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: worker(0.0), "generating is 0.0: it must be finite, above 0.0"),
        (lambda: worker(math.inf), "value is inf"),
        (lambda: worker(slots=0), "slots is 0: it must be finite, at least 1"),
        (lambda: worker(admitted=1.1), "at most 1.0"),
        (lambda: worker(apply=7.0), "apply_s is 7.0"),
        (lambda: inputs(train=0.0), "train_s is 0.0"),
        (lambda: inputs(no_signal=1.5), "no_signal is 1.5"),
        (lambda: Transfer(0.0, 1.0), "nbytes is 0.0"),
        (lambda: CapacityInputs(JobShape(4, 5, 3), 1.0, 1.0, 0.0, EQUAL, ()), "workers is empty"),
    ],
)
def test_inputs_that_cannot_be_are_named(make, word: str) -> None:
    with pytest.raises(CapacityError, match=word):
        make()
