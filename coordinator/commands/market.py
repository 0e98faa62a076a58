"""What `echo2 market` shows."""

from __future__ import annotations

from typing import Any

from coordinator.commands.output import console, dollars, figure, show_table, when
from coordinator.commands.pool import price


def show_market(reply: Any) -> None:
    """Every running job: the decision in words, then who is active and who waits, and why."""
    if not reply["jobs"]:
        console.print("no job is running: the market opens with one")
    for job in reply["jobs"]:
        _show_job(job)


def _show_job(job: Any) -> None:
    console.print(f"{job['name']} ({job['job_id']}): {job['reason']}", soft_wrap=True)
    required = "not measured yet" if job["required_rate"] is None else f"{job['required_rate']:.3g}"
    console.print(
        f"  completions/s: required {required} (planned {job['headroom']:g} times as much), the active set brings {job['offered_rate']:.3g}"
    )
    worth = "" if job["usd_per_thousand"] is None else f", {job['usd_per_thousand']:.4f} USD per 1,000 admitted completions"
    console.print(f"  {job['active']} active for {job['usd_per_hour']:.4f} USD/h{worth}")
    console.print(f"  learner idle: predicted {_share(job['predicted_idle'])}, measured {_share(job['measured_idle'])}")
    if job["binding"] is not None:
        console.print(f"  limited by {job['binding']}: {job['binding_words']}", soft_wrap=True)
    if job["infeasible_because"]:
        console.print(f"  {job['infeasible_because']}", soft_wrap=True)
    for gain in job["gains"]:
        console.print(f"  {gain['words']}", soft_wrap=True)
    rows = (
        (
            one["name"],
            price(one["uusd_per_hour"]),
            figure(one["completions_per_s"], 2) + ("" if one["is_measured"] else " (claimed)"),
            figure(one["usd_per_thousand"], 4),
            dollars(one["uusd_per_million_tokens"]),
            "yes" if one["is_active"] else "",
            one["reason"],
        )
        for one in job["offers"]
    )
    show_table("Offers", ("worker", "$/h", "completions/s", "$ per 1,000", "$ per 1M tokens", "active", "why"), rows)


def _share(value: float | None) -> str:
    return "not known" if value is None else f"{value:.1%}"


def show_history(reply: Any) -> None:
    """Prices, then quotes."""
    rows = ((when(one["at"]), one["name"], price(one["uusd_per_hour"])) for one in reply["prices"])
    show_table("Prices", ("since", "worker", "$/h"), rows)
    quotes = (
        (
            when(one["made_at"]),
            one["name"],
            dollars(one["uusd_per_million_tokens"]),
            price(one["uusd_per_idle_hour"]),
            one["reason"],
            when(one["ended_at"]),
            one["ended_because"],
        )
        for one in reply["quotes"]
    )
    show_table("Quotes", ("made", "worker", "$ per 1M tokens", "$/h idle", "why", "ended", "because"), quotes)
