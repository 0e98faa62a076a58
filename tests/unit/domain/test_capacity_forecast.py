"""Rehearsals where the answer is known by hand, and what a change would buy."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from coordinator.domain.capacity import Binding, synchronous_share
from coordinator.domain.capacity_forecast import CEILING, faster_link, forecast, gains, rehearsal_of
from coordinator.domain.capacity_inputs import CapacityInputs, Estimate, JobShape, Lengths, Loading, Transfer, WorkerCapacity
from coordinator.domain.rehearsal import Player, Rehearsal, rehearse

ALL_ALIKE = Lengths((1.0,))
TAILED = Lengths.lognormal(0.5)


def play(*players: Player, lengths: Lengths = ALL_ALIKE, seed: int = 0, **rest):
    values = {"group_size": 4, "groups_per_step": 8, "bound": 3, "kappa": 1, "train_s": 10.0, "steps": 80, **rest}
    return rehearse(Rehearsal(players, **values), lengths.draw, seed)


class TestRehearsal:
    def test_synchronous_steps_take_the_sum_of_their_parts(self) -> None:
        """S = 0, slots for a whole step, lengths alike: T_train / (T_train + T_bcast + T_gen + T_grade), T_bcast in the mean."""
        found = play(Player(32, 5.0, 4.0), bound=0, grade_s=1.0, steps=400)
        assert found.utilisation == pytest.approx(synchronous_share(train_s=10.0, bcast_s=4.0, last_s=5.0, grade_s=1.0), abs=0.01)
        assert found.staleness == {0: 8 * 380}

    def test_enough_in_time_keeps_the_learner_busy(self) -> None:
        """1.25 of the rate, the way is short: nothing waits, nothing is thrown away, staleness within S."""
        found = play(Player(16, 4.0, 1.0), lengths=TAILED)
        assert found.utilisation == pytest.approx(1.0)
        assert found.discards == 0.0
        assert max(found.staleness) <= 3
        assert sum(found.staleness.values()) == 8 * found.steps

    def test_a_rate_of_nine_tenths_gives_nine_tenths(self) -> None:
        found = play(Player(16, 16 / (0.9 * 3.2), 1.0), lengths=TAILED, steps=400)
        assert found.utilisation == pytest.approx(0.9, abs=0.01)

    @pytest.mark.parametrize(("admitted", "no_signal", "expected"), [(0.75, 0.0, 0.75), (1.0, 0.2, 0.8)])
    def test_what_is_refused_or_teaches_nothing_costs_its_share(self, admitted, no_signal, expected) -> None:
        """Exactly the required rate, times the share."""
        two = Player(8, 5.0, 1.0, admitted=admitted)
        found = play(two, two, lengths=TAILED, no_signal=no_signal, steps=500, bound=6)
        assert found.utilisation == pytest.approx(expected, abs=0.02)

    def test_a_worker_alone_gets_its_own_back(self) -> None:
        found = play(Player(16, 4.0, 1.0, admitted=0.7))
        assert found.utilisation > 0.8

    def test_idle_loading_costs_rate_and_fetching_in_the_background_does_not(self) -> None:
        """A load of 4 of every 10 s at 1.1 of the rate: 1.1 / (1 + 1.1 * 0.4); in the background nothing."""
        kept = play(Player(16, 16 / 3.52, 4.0), lengths=TAILED, bound=6, steps=200)
        idle = play(Player(16, 16 / 3.52, 4.0, loading=Loading.IDLE), lengths=TAILED, bound=6, steps=400)
        assert kept.utilisation == pytest.approx(1.0, abs=0.005)
        assert idle.utilisation == pytest.approx(1.1 / 1.44, abs=0.02)

    def test_aborting_costs_the_age_of_what_runs(self) -> None:
        """8 a second of 8.9 that are needed; (1 + 0.25) / 2 of 0.5 s are lost once a step: l = 8 / (32 + 8 * 0.3125)."""
        one = Player(2, 0.5, 0.3, loading=Loading.ABORT)
        found = play(one, one, lengths=TAILED, bound=6, steps=300, train_s=3.6)
        assert found.utilisation == pytest.approx(3.6 * 8 / 34.5, abs=0.015)

    def test_too_long_a_way_throws_away(self) -> None:
        """S = 1 with completions of a step and a half: what is made is often too old, and the learner waits."""
        found = play(Player(64, 15.0, 5.0), lengths=TAILED, bound=1)
        assert found.discards > 0.02
        assert found.utilisation < 0.8
        assert max(found.staleness) == 1

    def test_heavy_tails_are_buried_with_their_groups(self) -> None:
        """Completions of 40 steps now and then: groups die, and the job goes on within the bound."""
        found = play(Player(16, 1.0, 1.0), Player(16, 1.0, 1.0), lengths=Lengths((0.5,) * 199 + (400.0,)), bound=2)
        assert found.discards > 0.0
        assert found.steps == 60
        assert max(found.staleness) <= 2

    def test_publishing_as_rarely_as_the_bound_allows_is_lockstep(self) -> None:
        """kappa = S + 1 = 2: a version serves its own step and the next, nothing is early enough to be wasted."""
        found = play(Player(64, 5.0, 2.0), lengths=TAILED, bound=1, kappa=2)
        assert found.staleness == {0: 8 * 30, 1: 8 * 30}
        assert found.discards == 0.0

    @pytest.mark.parametrize("grade_s", [0.0, 15.0])
    def test_nothing_is_lost_track_of_when_all_goes_wrong(self, grade_s: float) -> None:
        """Queues, refusals, late grades, S = 1: groups die waiting, running, in parts and while graded; none is trained too old."""
        slow = Player(2, 9.0, 8.0, 2.0, admitted=0.8)
        fleet = (slow, replace(slow, slots=7), *(replace(slow, slots=12, generation_s=4.0),) * 3)
        found = play(*fleet, lengths=Lengths.lognormal(1.0), bound=1, grade_s=grade_s, steps=120)
        assert found.discards > 0.05
        assert found.staleness.keys() <= {0, 1}
        assert sum(found.staleness.values()) == 8 * found.steps

    def test_the_end_of_a_job_waits_for_its_last_groups(self) -> None:
        """With planned steps nothing is issued beyond them, so the last step waits for the slowest completion."""
        ends = play(Player(16, 4.0, 1.0), lengths=TAILED, steps=10, warm_up=0, planned_steps=10)
        goes_on = play(Player(16, 4.0, 1.0), lengths=TAILED, steps=10, warm_up=0)
        assert ends.steps == goes_on.steps == 10
        assert sum(ends.staleness.values()) == 80
        assert ends.utilisation <= goes_on.utilisation

    def test_it_gives_up_when_almost_nothing_is_of_use(self) -> None:
        """Nothing is admitted: no step is ever taken."""
        found = play(Player(16, 4.0, 1.0, admitted=1e-9), Player(16, 4.0, 1.0, admitted=1e-9), most_completions=500)
        assert not found.whole
        assert (found.steps, found.utilisation, found.completions) == (0, 0.0, 500)

    def test_seeded(self) -> None:
        one = [play(Player(16, 5.5, 1.0), lengths=TAILED, seed=seed) for seed in (1, 1, 2)]
        assert one[0] == one[1] != one[2]


def inputs(*workers: WorkerCapacity, bound: int = 3, transfer: Transfer | None = None) -> CapacityInputs:
    return CapacityInputs(JobShape(4, 8, bound), 10.0, 1.5, 0.1, TAILED, workers, transfer)


def worker(name: str, rate: float, **rest) -> WorkerCapacity:
    return WorkerCapacity(name, 2, Estimate(rate), Estimate(1.0), 1.0, **rest)


class TestForecast:
    def test_inside_the_line_it_agrees_with_the_formula(self) -> None:
        found = forecast(inputs(worker("a", 1.3), worker("b", 1.5)))
        assert found.assessment.inside
        assert found.utilisation == pytest.approx(2.8 / 3.2, abs=0.02)
        assert found.step_s == pytest.approx(10 / found.utilisation)
        assert max(found.staleness) <= 3

    def test_a_hopeless_fleet_has_no_step_time(self) -> None:
        """Almost nothing is admitted."""
        none = replace(worker("a", 3.2), admitted=Estimate(1e-9))
        found = forecast(inputs(none, none), completions=100)
        assert (found.step_s, found.utilisation) == (math.inf, 0.0)

    def test_length_of_the_rehearsal(self) -> None:
        told = inputs(worker("a", 3.2))
        made = rehearsal_of(told, 1, steps=100)
        assert (made.warm_up, made.steps) == (18, 118)
        assert made.most_completions == CEILING * 118 * 32
        counted = [sum(forecast(told, completions=count).staleness.values()) for count in (1, 32 * 300, 10**9)]
        assert counted == [8 * 240, 8 * 300, 8 * 400]


class TestGains:
    def test_a_short_fleet_gains_by_a_worker_only(self) -> None:
        """2.4 of 3.2 rollouts/s; one more of 0.8 closes the gap; more S does nothing."""
        found = gains(inputs(worker("a", 0.8), worker("b", 0.8), worker("c", 0.8)))
        assert [gain.change for gain in found] == ["one more worker like b", "S = 4"]
        assert found[0].utilisation == pytest.approx(0.25, abs=0.03)
        assert "the learner is busy" in found[0].words
        assert "nothing that can be told from chance" in found[1].words

    def test_a_late_fleet_gains_by_slack(self) -> None:
        """Three times the rate, but S = 1: slack lets steps overlap and less is thrown away."""
        found = gains(inputs(worker("a", 3.0), worker("b", 0.7), bound=1), completions=6000)
        slack = found[1]
        assert slack.change == "S = 2"
        assert slack.utilisation > 0.05
        assert slack.forecast.assessment.binding is not Binding.GENERATION

    def test_links_are_part_when_measured(self) -> None:
        """No transfer, no answer about Mbit/s; with one the change is named."""
        found = gains(inputs(worker("a", 3.0), transfer=Transfer(1e9, 10.0)), completions=1000)
        assert found[2].change == "one more Mbit/s up at the coordinator"


class TestFasterLink:
    def test_the_seeder_when_it_is_the_bottleneck(self) -> None:
        """10 -> 11 Mbit/s up, all else fast: T_bcast shrinks by 10 / 11, applying does not."""
        told = inputs(worker("a", 1.0, apply_s=0.2, up_mbps=500.0, down_mbps=900.0))
        change, after = faster_link(told, Transfer(1e9, 10.0))
        assert change == "one more Mbit/s up at the coordinator"
        assert after.workers[0].bcast_s == pytest.approx(0.2 + 0.8 * 10 / 11)
        assert after.bcast_p95_s == pytest.approx(1.5 * 10 / 11)

    def test_the_slowest_downlink_when_it_is(self) -> None:
        told = inputs(worker("a", 1.0, down_mbps=100.0), worker("b", 1.0, down_mbps=4.0), worker("c", 1.0))
        change, after = faster_link(told, Transfer(1e9, 1000.0))
        assert change == "one more Mbit/s down at b"
        assert after.bcast_p95_s == pytest.approx(1.5 * 4 / 5)
