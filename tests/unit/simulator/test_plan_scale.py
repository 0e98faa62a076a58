"""A large job is planned on a smaller scale: the rehearsal of the whole job says the same."""

from __future__ import annotations

import pytest

from coordinator.domain.capacity_forecast import forecast, rehearsal_of
from coordinator.domain.plan_bounds import setting_of
from coordinator.domain.plan_fleet import capacity_inputs
from coordinator.domain.rehearsal import rehearse
from tests.unit.domain.plans import job, question
from tests.unit.pricing.markets import offer

SLOW = {"snapshot_s": 6.0, "apply_s": 0.2, "tokens_per_s": 10.0}


@pytest.mark.parametrize("bound", [1, 3])
def test_the_whole_job_says_the_same(bound: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,024 rollouts a step on 48 workers of two kinds, outside the warning line: within 0.03."""
    market = [offer("a", 0.1, 2.0, count=40), offer("b", 0.1, 5.0, count=8)]
    asked = question(job(bound=bound, size=8, groups=128, publish_every=1), market, **SLOW)
    counts = {"a": 40, "b": 8}
    said = forecast(setting_of(asked, counts, bound).inputs)
    monkeypatch.setattr("coordinator.domain.plan_fleet.REHEARSED", 1024)
    whole = capacity_inputs(
        asked.job,
        asked.facts,
        asked.by_id,
        counts,
        bound=bound,
        t_bcast_s=setting_of(asked, counts, bound).inputs.workers[0].bcast_s,
    )
    assert len(whole.workers) == 48
    found = rehearse(rehearsal_of(whole, 1, steps=100), whole.lengths.draw, 7)
    assert said.utilisation == pytest.approx(found.utilisation, abs=0.03)
    assert said.discards == pytest.approx(found.discards, abs=0.03)
    assert said.utilisation < 0.99
