"""A worker's lazy time: deliveries, pauses, skips and death, by hand."""

from __future__ import annotations

from math import inf

import pytest

from simulator.fleet.worker import COLD, FleetWorker, Publication


def make(*, idles: bool = False, apply_s: float = 2.0) -> FleetWorker:
    worker = FleetWorker(0, 0, slots=2, generation_s=10.0, apply_s=apply_s, idles=idles)
    worker.begin(0.0)
    return worker


def published(at: float, version: int, takes_s: float, cold_s: float = 100.0, most_skip: float = inf) -> Publication:
    return Publication(at, version, ((takes_s,),), (cold_s,), most_skip)


def test_the_first_version_comes_cold() -> None:
    """A keyframe, without a pause: nothing runs yet."""
    worker, log = make(), [published(0.0, 0, 5.0)]
    worker.look(99.0, log)
    assert worker.version == COLD
    worker.look(100.0, log)
    assert (worker.version, worker.still_s) == (0, pytest.approx(2.0))


def test_applying_stops_work_for_its_time() -> None:
    """Work time falls behind wall time by the pause, and stands during it."""
    worker, log = make(), [published(0.0, 0, 5.0), published(200.0, 1, 20.0)]
    worker.look(150.0, log)
    before = worker.still_s
    worker.look(219.0, log)
    assert worker.version == 0
    assert worker.work_time(219.0) == pytest.approx(219.0 - before)
    worker.look(221.0, log)
    assert worker.still_until == pytest.approx(222.0)
    assert worker.work_time(221.0) == pytest.approx(220.0 - before)
    worker.look(230.0, log)
    assert worker.version == 1
    assert worker.work_time(230.0) == pytest.approx(228.0 - before)


def test_one_that_idles_stands_still_from_publication_on() -> None:
    """The paper's worker."""
    worker, log = make(idles=True, apply_s=0.0), [published(0.0, 0, 5.0), published(200.0, 1, 20.0)]
    worker.look(190.0, log)
    at_190 = worker.work_time(190.0)
    worker.look(215.0, log)
    assert worker.work_time(215.0) == pytest.approx(at_190 + 10.0)
    assert worker.still_until == pytest.approx(220.0)


def test_versions_that_came_meanwhile_are_skipped() -> None:
    """The next fetch is of the newest there is, and grows with the versions skipped, up to a keyframe."""
    log = [published(0.0, 0, 5.0)] + [published(200.0 + 10 * i, i, 25.0) for i in range(1, 5)]
    worker = make(apply_s=0.0)
    worker.look(236.0, log)  # 1 from 210 to 235; then 3, of 230, over two versions
    assert (worker.version, worker.target) == (1, 3)
    assert worker.swap_at == pytest.approx(235.0 + 25.0 * 2**0.68)
    capped = [published(one.at, one.version, 25.0, most_skip=1.2) for one in log]
    worker = make(apply_s=0.0)
    worker.look(236.0, capped)
    assert worker.swap_at == pytest.approx(235.0 + 25.0 * 1.2)


def test_it_does_not_matter_when_somebody_looks() -> None:
    """Looking often or once gives the same state."""
    log = [published(0.0, 0, 5.0)] + [published(13.0 * i, i, 7.0 + i % 5) for i in range(1, 40)]
    once, often = make(), make()
    for tenth in range(5000):
        often.look(tenth / 10, log)
    once.look(499.9, log)
    assert (once.version, once.target) == (often.version, often.target)
    assert once.still_s == pytest.approx(often.still_s)


def test_a_dead_worker_stays_as_it_was() -> None:
    """And forgets when it comes back."""
    worker, log = make(), [published(0.0, 0, 5.0), published(200.0, 1, 20.0)]
    worker.look(210.0, log)
    worker.die(210.0)
    at_death = worker.work_time(210.0)
    worker.look(500.0, log)
    assert worker.version == 0
    assert worker.work_time(500.0) == pytest.approx(at_death)
    worker.end()
    worker.revive()
    assert worker.version == COLD


def test_what_is_begun_is_paid_by_nobody_else() -> None:
    """A worker that is drained and activated again keeps its weights and its unfinished work's places."""
    worker, log = make(), [published(0.0, 0, 5.0)]
    worker.look(150.0, log)
    worker.end()
    assert (worker.active, worker.version) == (False, 0)
    worker.begin(300.0)
    assert worker.free_at == [pytest.approx(298.0)] * 2
