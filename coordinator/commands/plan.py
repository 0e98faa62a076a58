"""What `echo2 plan` does: reads a job file and a market file, plans on this machine, and shows the plan. No coordinator is asked."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import typer

from coordinator.commands.job_file import JobFileWrong, read_job
from coordinator.commands.output import console, errors, figure, show_json, show_table
from coordinator.domain.plan import plan
from coordinator.domain.plan_facts import Fact, PlanRefused
from coordinator.service.plan_model import model_facts
from coordinator.service.plan_view import plan_view, question_of
from coordinator.wire.job import JobConfig
from coordinator.wire.plan import PlannedFleet, PlanView
from pricing.errors import OfferRefused
from pricing.feeds.static import MOST_FILE_BYTES, offers_of_file
from pricing.offers import Offer

INFEASIBLE = 3
BAD_INPUT = 2
BAR = 20  # characters
SHOWN_OFFERS = 12


def run(
    job_file: Path,
    market_file: Path,
    overrides: Sequence[str],
    *,
    required_rate: float | None,
    headroom: float | None,
    assumed: Sequence[str],
    as_json: bool,
) -> None:
    """Show the plan. Exit code 0: there is one; 3: no fleet does, in words; 2: bad input, in words."""
    try:
        view = planned(
            job_file, market_file, overrides, required_rate=required_rate, headroom=headroom, assumptions=numbers(assumed)
        )
    except (JobFileWrong, OfferRefused, PlanRefused) as error:
        errors.print(f"error: {error}", style="red", soft_wrap=True)
        raise typer.Exit(BAD_INPUT) from error
    if as_json:
        show_json(view.model_dump(mode="json"))
    else:
        show(view)
    if view.infeasible_because is not None:
        raise typer.Exit(INFEASIBLE)


def planned(
    job_file: Path,
    market_file: Path,
    overrides: Sequence[str],
    *,
    required_rate: float | None,
    headroom: float | None,
    assumptions: Mapping[str, float],
) -> PlanView:
    """The plan. Raises JobFileWrong, OfferRefused, PlanRefused."""
    job = JobConfig.model_validate(read_job(job_file, overrides))
    by_rate = required_rate is not None
    question = question_of(
        job,
        read_market(market_file),
        given=assumptions,
        measured={} if by_rate else of_files(job, job_file.parent),
        required_rate=required_rate,
        headroom=headroom,
        now=time.time(),
    )
    return plan_view(plan(question), question.facts, by_rate=by_rate)


def numbers(assumed: Sequence[str]) -> dict[str, float]:
    """`name=value`, repeated. Raises PlanRefused."""
    found: dict[str, float] = {}
    for text in assumed:
        name, equals, value = text.partition("=")
        try:
            found[name.strip()] = float(value)
        except ValueError:
            wrong = f"{name} is {value!r:.80}: give a number" if equals else f"{text!r:.80} does not read name=value"
            raise PlanRefused(f"--assume {wrong}, for example mean_tokens=600") from None
    return found


def read_market(path: Path) -> tuple[Offer, ...]:
    """The offers of a market file. Raises OfferRefused, which names the file too."""
    try:
        if path.stat().st_size > MOST_FILE_BYTES:
            raise OfferRefused(f"it is larger than {MOST_FILE_BYTES} bytes: give fewer offers")
        return offers_of_file(path.read_bytes(), "toml" if path.suffix == ".toml" else "json")
    except OSError as error:
        raise OfferRefused(f"{path} cannot be read: {error.strerror}: name a price file with --market") from error
    except OfferRefused as error:
        raise OfferRefused(f"{path}: {error}") from error


def of_files(job: JobConfig, base: Path) -> dict[str, Fact]:
    """Figures of the model, if it lies here."""
    directory = (base / job.model).expanduser()
    return model_facts(directory, job.algorithm.learning_rate) if directory.is_dir() else {}


def show(view: PlanView) -> None:
    """For people: the answer first, then the fleets, the bounds, and what was assumed."""
    _show_answer(view)
    if view.fleets:
        _show_fleets(view.fleets)
    elif view.most_allowed is not None:
        _show_fleets((view.most_allowed,))
    if view.S_table:
        rows = (
            (
                f"{'>' if line.S == view.S else ' '} {line.S}",
                line.kappa,
                f"{bar(line.learner_utilisation)} {line.learner_utilisation:.0%}",
                "" if line.discards is None else f"{line.discards:.1%}",
                "yes" if line.feasible else "no",
                f"S >= {line.warning_line}" + (" (inside)" if line.inside else ""),
            )
            for line in view.S_table
        )
        title = "What another S would give, with the cheapest fleet" if view.fleets else "What another S would give"
        show_table(title, ("S", "kappa", "learner busy", "thrown away", "feasible", "safe in the worst case"), rows)
    for words in view.would_help:
        console.print(f"would buy: {words}", soft_wrap=True)
    if view.assumptions:
        rows_of = ((one.name, f"{one.value:.6g}", one.unit, one.source, one.why) for one in view.assumptions)
        show_table("Taken for true (another figure: --assume name=value)", ("name", "value", "unit", "source", "why"), rows_of)
    if view.refused_offers:
        show_table("Offers that cannot be used", ("offer", "why"), list(view.refused_offers.items())[:SHOWN_OFFERS])
        if (more := len(view.refused_offers) - SHOWN_OFFERS) > 0:
            console.print(f"and {more} more")


def bar(share: float) -> str:
    """A small picture of a share."""
    full = round(min(max(share, 0.0), 1.0) * BAR)
    return "█" * full + "░" * (BAR - full)


def _show_answer(view: PlanView) -> None:
    if view.infeasible_because is not None:
        console.print(f"NO FLEET DOES: {view.infeasible_because}", style="red", soft_wrap=True)
    planned_rate = "no rate" if view.planned_rate is None else f"{view.planned_rate:.4g}"
    console.print(
        f"required {view.required_rate:.4g} completions/s, planned {planned_rate} (headroom {view.headroom:g});"
        f" S = {view.S}, kappa = {view.kappa}",
        soft_wrap=True,
    )
    for one in view.assumptions:
        if one.name == "train_s" and one.source == "assumed":  # the rate, and so the verdict, is in proportion to it
            console.print(f"train_s assumed, {one.value:.4g} s a step: {one.why}", style="yellow", soft_wrap=True)
    console.print(f"binding: {view.binding_term} ({view.binding_words})", soft_wrap=True)


def _show_fleets(fleets: Sequence[PlannedFleet]) -> None:
    lines = (
        ("workers", lambda one: str(one.workers)),
        ("offers", _offers),
        ("completions/s", lambda one: f"{one.completions_per_second:.4g}"),
        ("USD/h all in", lambda one: f"{one.usd_per_hour:.4f}"),
        ("USD/h asked", lambda one: f"{one.asked_usd_per_hour:.4f}"),
        ("USD per step", lambda one: figure(one.usd_per_step, 5)),
        ("USD per 1,000 completions", lambda one: figure(one.usd_per_1000_completions, 5)),
        ("USD to the end", lambda one: figure(one.usd_to_end, 2)),
        ("hours to the end", lambda one: figure(one.hours_to_end, 2)),
        ("T_bcast, s", lambda one: figure(one.t_bcast_s, 1)),
        ("learner busy", _busy),
        ("learner idle", lambda one: "" if one.learner_idle is None else f"{one.learner_idle:.1%}"),
        ("thrown away", lambda one: "" if one.discards is None else f"{one.discards:.1%}"),
        ("staleness", _staleness),
    )
    rows = [(name, *(read(one) for one in fleets)) for name, read in lines]
    shown = [row for row in rows if any(row[1:])]
    show_table("Fleets" if len(fleets) > 1 else "The best that the limits allow", ("", *(one.name for one in fleets)), shown)
    for one in fleets:
        console.print(f"{one.name}: {one.reason}", soft_wrap=True)


def _offers(fleet: PlannedFleet) -> str:
    lines = [f"{one.count} x {one.id}" for one in fleet.offers[:SHOWN_OFFERS]]
    more = len(fleet.offers) - len(lines)
    return "\n".join(lines + ([f"and {more} more"] if more else []))


def _busy(fleet: PlannedFleet) -> str:
    if fleet.learner_utilisation is None:
        return ""
    return f"{bar(fleet.learner_utilisation)} {fleet.learner_utilisation:.1%}"


def _staleness(fleet: PlannedFleet) -> str:
    """Shares by staleness, most of them one line each."""
    total = sum((fleet.staleness or {}).values())
    return "\n".join(f"{age}: {groups / total:.0%}" for age, groups in (fleet.staleness or {}).items() if groups / total >= 0.005)
