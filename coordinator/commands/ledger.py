"""What `echo2 ledger` asks for and shows."""

from __future__ import annotations

from typing import Any

from coordinator.commands.output import console, show_table, when
from coordinator.errors import CoordinatorError
from coordinator.rest_client import RestClient
from pricing.money import usd_to_uusd, uusd_to_usd


def filters(*, job: str | None, worker: str | None, account: str | None, limit: int) -> dict[str, Any]:
    """The query of GET /ledger: what was given."""
    given = {"job": job, "worker": worker, "account": account, "limit": limit}
    return {name: value for name, value in given.items() if value is not None}


async def entries(client: RestClient, query: dict[str, Any]) -> Any:
    """The newest entries that match."""
    return await client.get("/ledger", query)


async def balances(client: RestClient, query: dict[str, Any]) -> Any:
    """The accounts that match."""
    return await client.get("/ledger/balances", {name: value for name, value in query.items() if name != "account"})


def show_entries(reply: Any) -> None:
    """One line a posting; an entry's words stand beside its first one."""
    rows = []
    for entry in reply["entries"]:
        for place, posting in enumerate(entry["postings"]):
            first = (entry["seq"], when(entry["at"]), entry["kind"]) if place == 0 else ("", "", "")
            rows.append(
                (
                    *first,
                    posting["account"],
                    usd(posting["uusd"]),
                    usd(posting["balance_uusd"]),
                    entry["reason"] if place == 0 else "",
                )
            )
    show_table("Ledger", ("seq", "when", "kind", "account", "USD", "balance", "why"), rows)
    if reply["next_before"] is not None:
        console.print(f"older entries: GET /api/v1/ledger?before={reply['next_before']}, or a larger --limit")


def show_balances(reply: Any) -> None:
    """Sums by kind, then the accounts."""
    show_table("Totals", ("kind", "USD"), ((kind, usd(uusd)) for kind, uusd in sorted(reply["totals"].items())))
    rows = ((a["account"], a["worker_id"], usd(a["uusd"]), a["postings"]) for a in reply["accounts"])
    show_table("Accounts", ("account", "worker", "USD", "postings"), rows)


async def pay(client: RestClient, worker: str, amount: str, note: str) -> Any:
    """Put on record that a worker was paid. `amount`: USD, as a person wrote them."""
    try:
        uusd = usd_to_uusd(amount)
    except (ValueError, ArithmeticError) as error:
        raise CoordinatorError(f"USD: {amount!r} is not an amount of money: give a number of USD above 0") from error
    return await client.post("/ledger/payouts", {"worker": worker, "uusd": uusd, "note": note})


def show_payout(reply: Any) -> None:
    """What is on record, and what is left."""
    left = reply["earned_uusd"] - reply["paid_out_uusd"]
    console.print(
        f"{usd(reply['uusd'])} USD paid to worker {reply['worker_id']} are on record as {reply['entry_id']}; "
        f"{usd(reply['paid_out_uusd'])} of {usd(reply['earned_uusd'])} USD earned are paid out, {usd(left)} are left"
    )


def usd(uusd: int) -> str:
    """Dollars with every digit that the ledger holds."""
    return f"{uusd_to_usd(uusd):.6f}"
