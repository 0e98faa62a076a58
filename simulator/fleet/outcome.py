"""What a simulated fleet came to: figures for people, JSON for scripts, the same for the same scenario."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pricing.decision import Activation
from pricing.money import uusd_to_usd
from simulator.fleet.laws import State
from simulator.fleet.scenario import Scenario
from simulator.fleet.spread import last_s

if TYPE_CHECKING:
    from simulator.fleet.run import Run

HOUR_S = 3600.0
DIGITS = 6  # of a figure: less than chance, more than a reader wants


@dataclass(frozen=True, slots=True)
class Sample:
    """The fleet at one moment."""

    hours: float
    active: int
    standby: int
    gone: int
    step: int
    trained_s: float  # by the learner, so far
    usd_per_hour: float  # all active workers', as asked
    spent_usd: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """The whole answer. Money in USD, for display."""

    figures: dict[str, Any]
    samples: tuple[Sample, ...]
    broadcasts_s: tuple[float, ...]  # until the last active worker served each version but the first
    reasons: tuple[str, ...]  # of the decisions, each once, in order

    def as_json(self) -> dict[str, Any]:
        """One document."""
        series = [{name: _round(getattr(one, name)) for name in Sample.__dataclass_fields__} for one in self.samples]
        return {**self.figures, "over_time": series, "decisions": list(self.reasons)}


@dataclass(slots=True)
class Recorder:
    """Takes notes while the simulation runs."""

    scenario: Scenario
    joined: int = 0
    departed: int = 0
    trained_s: float = 0.0
    first_seal: float | None = None
    samples: list[Sample] = field(default_factory=list)
    broadcasts: list[float] = field(default_factory=list)
    mean_times: list[float] = field(default_factory=list)
    reasons: dict[str, None] = field(default_factory=dict)
    reviews: int = 0
    binding: Counter[str] = field(default_factory=Counter)
    started: int = 0  # workers that activation started, and let go
    drained: int = 0
    short: int = 0  # decisions that found no sufficient set

    def sealed(self, now: float) -> None:
        """A batch is on its way to the learner."""
        self.first_seal = now if self.first_seal is None else self.first_seal

    def broadcast(self, times: Sequence[Sequence[float]], counts: Sequence[int], apply_s: float) -> None:
        """A version's way to the active workers."""
        self.broadcasts.append(last_s(times) + apply_s)
        weighed = [(count / len(one), time) for one, count in zip(times, counts, strict=True) if one for time in one]
        self.mean_times.append(sum(weight * time for weight, time in weighed) / sum(weight for weight, _ in weighed) + apply_s)

    def decided(self, decision: Activation) -> None:
        """One review."""
        self.reviews += 1
        self.binding[decision.binding] += 1
        self.started += sum(change.count for change in decision.start)
        self.drained += sum(change.count for change in decision.drain)
        self.short += decision.infeasible_because is not None
        if len(self.reasons) < 100 and (decision.start or decision.drain):
            self.reasons[decision.infeasible_because or decision.reason] = None

    def trained_until(self, run: Run) -> float:
        """Seconds in which the learner trained, the open step as far as it came."""
        open_s = 0.0 if run.training_since is None else run.now - run.training_since
        return self.trained_s + min(open_s, self.scenario.job.train_s)

    def sample(self, run: Run) -> None:
        """Note how things stand."""
        census = run.census()
        self.samples.append(
            Sample(
                hours=run.now / HOUR_S,
                active=census["active"],
                standby=census["standby"],
                gone=census["gone"],
                step=run.board.step,
                trained_s=self.trained_until(run),
                usd_per_hour=uusd_to_usd(run.purse.price_sum),
                spent_usd=uusd_to_usd(run.purse.spent(run.now)),
            )
        )

    def outcome(self, run: Run, why: str) -> Outcome:
        """The end."""
        board, now = run.board, run.now
        since = 0.0 if self.first_seal is None else self.first_seal
        trained_s = self.trained_until(run)
        paid_s = sum(worker.paid_s + (now - worker.paid_from if worker.paid else 0.0) for worker in run.workers)
        busy_s = sum(worker.busy_s / worker.slots for worker in run.workers)
        figures = {
            "name": self.scenario.name,
            "seed": self.scenario.seed,
            "ended_because": why,
            "hours": now / HOUR_S,
            "steps": board.step,
            "step_s": now / board.step if board.step else None,
            "utilisation": trained_s / (now - since) if now > since else 0.0,
            "utilisation_with_start": trained_s / now if now else 0.0,
            "staleness": {str(age): count for age, count in sorted(board.staleness.items())},
            "kappa": run.kappa,
            **self._completions(run),
            "cost": self._cost(run),
            "t_bcast_s": _spread(self.broadcasts, self.mean_times),
            "workers": self._workers(run, busy_s / paid_s if paid_s else None),
            "activation": {
                "reviews": self.reviews,
                "started": self.started,
                "drained": self.drained,
                "found_too_few": self.short,
                "binding": dict(sorted(self.binding.items())),
            },
            "events": run.events,
            "laws_checked": run.laws.checked,
        }
        return Outcome(_round(figures), tuple(self.samples), tuple(self.broadcasts), tuple(self.reasons))

    def _completions(self, run: Run) -> dict[str, Any]:
        counts, states = run.board.counts, run.laws.by_state
        begun = counts.leased - counts.never_began
        in_flight = sum(len(lease.lengths) for worker in run.workers for lease in worker.leases)
        return {
            "discards": (counts.too_old + counts.accepted_too_old) / begun if begun else 0.0,
            "rejected": dict(sorted(run.board.rejected.items())),
            "groups": {
                "issued": counts.issued_groups,
                "trained": states[State.TRAINED],
                "rejected": states[State.REJECTED],
                "pending": len(run.board.unsettled),
            },
            "completions": {
                "leased": counts.leased,
                "accepted": counts.accepted,
                "refused": counts.refused,
                "lost": counts.lost,
                "too_old": counts.too_old,
                "never_began": counts.never_began,
                "in_flight": in_flight,
                "expired_leases": counts.expired_leases,
            },
        }

    def _cost(self, run: Run) -> dict[str, Any]:
        now, step, purse = run.now, run.board.step, run.purse
        learner, total, moved = purse.learner(now), purse.spent(now), purse.transfer_uusd
        trained = run.laws.by_state[State.TRAINED] * self.scenario.job.group_size
        return {
            "usd": uusd_to_usd(total),
            "learner_usd": uusd_to_usd(learner),
            "transfer_usd": uusd_to_usd(moved),
            "workers_usd": uusd_to_usd(total - learner - moved),
            "usd_per_step": uusd_to_usd(total) / step if step else None,
            "usd_per_thousand": uusd_to_usd(total) / trained * 1000 if trained else None,
            "rollout_usd_per_thousand": uusd_to_usd(total - learner) / trained * 1000 if trained else None,
        }

    def _workers(self, run: Run, busy: float | None) -> dict[str, Any]:
        active = [one.active for one in self.samples] or [0]
        return {
            "joined": self.joined,
            "departed": self.departed,
            "present": self.joined - self.departed,
            "active_mean": sum(active) / len(active),
            "active_least": min(active[1:], default=0),
            "active_most": max(active),
            "busy": busy,
            "at_the_end": dict(sorted(run.census().items())),
        }


def _spread(last: Sequence[float], means: Sequence[float]) -> dict[str, Any]:
    """Over the publications: the last worker's time, and the mean worker's."""
    if not last:
        return {"publications": 0}
    ordered = sorted(last)
    return {
        "publications": len(ordered),
        "mean_worker": sum(means) / len(means),
        "last_worker": {
            "mean": sum(ordered) / len(ordered),
            "p50": ordered[len(ordered) // 2],
            "p95": ordered[min(int(0.95 * len(ordered)), len(ordered) - 1)],
            "most": ordered[-1],
        },
    }


def _round(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, dict):
        return {key: _round(one) for key, one in value.items()}
    return value


def words(outcome: Outcome) -> list[str]:
    """A summary that can be read aloud."""
    figures = outcome.figures
    cost, workers, bcast = figures["cost"], figures["workers"], figures["t_bcast_s"]
    per_step = "-" if cost["usd_per_step"] is None else f"{cost['usd_per_step']:.4f}"
    per_thousand = "-" if cost["usd_per_thousand"] is None else f"{cost['usd_per_thousand']:.4f}"
    rollouts = "-" if cost["rollout_usd_per_thousand"] is None else f"{cost['rollout_usd_per_thousand']:.4f}"
    step_s = "-" if figures["step_s"] is None else f"{figures['step_s']:.1f}"
    lines = [
        f"{figures['name']}: {figures['steps']} steps in {figures['hours']:.2f} h ({step_s} s each, start included);"
        f" it ended because {figures['ended_because']}",
        f"the learner was busy {figures['utilisation']:.1%} of the time from the first batch on;"
        f" {figures['discards']:.2%} of the completions were thrown away for their age",
        "staleness of the trained groups: " + (_histogram(figures["staleness"]) or "none was trained"),
        f"cost: {cost['usd']:.2f} USD = learner {cost['learner_usd']:.2f} + workers {cost['workers_usd']:.2f}"
        f" + transfer {cost['transfer_usd']:.2f}; {per_step} a step, {per_thousand} per 1,000 trained rollouts"
        f" ({rollouts} without the learner)",
        f"workers: {workers['active_mean']:.1f} active on average ({workers['active_least']} to {workers['active_most']}),"
        f" {workers['joined']} came and {workers['departed']} were lost"
        + ("" if workers["busy"] is None else f"; {workers['busy']:.1%} of their paid time made completions that ended"),
    ]
    if bcast["publications"]:
        last = bcast["last_worker"]
        lines.append(
            f"a version was at the last worker after {last['p50']:.1f} s (median; p95 {last['p95']:.1f}, most {last['most']:.1f}),"
            f" kappa {figures['kappa']}"
        )
    lines.append(f"{figures['laws_checked']} checks of the laws, none broken; {figures['events']} events")
    return lines


def _histogram(staleness: dict[str, int]) -> str:
    total = sum(staleness.values())
    return ", ".join(f"{age}: {count / total:.1%}" for age, count in staleness.items())
