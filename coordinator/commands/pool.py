"""What `echo2 worker`, `echo2 invite` and `echo2 token` send and show."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from coordinator.commands.output import console, counts, dollars, figure, show_table, when
from coordinator.errors import CoordinatorError
from coordinator.rest_client import RestClient
from pricing.money import usd_to_uusd, uusd_to_usd

ANY_HOST = "THIS-HOST"


def show_workers(reply: Any) -> None:
    """The pool."""
    rows = (
        (
            w["id"],
            w["name"],
            w["state"],
            price(w["price_uusd_per_hour"]),
            figure(w["tokens_per_s"], 0) if w["tokens_per_s"] > 0 else "",
            w["version"],
            w["accepted_rollouts"],
            w["reason"] or w["activity"],
        )
        for w in reply["workers"]
    )
    show_table("Workers", ("id", "name", "state", "$/h", "tok/s", "version", "accepted", "now"), rows)


def price(uusd_per_hour: int) -> str:
    """Dollars an hour with two decimals, and more only where they count."""
    cents, rest = f"{uusd_to_usd(uusd_per_hour):.6f}"[:-4], f"{uusd_to_usd(uusd_per_hour):.6f}"[-4:].rstrip("0")
    return cents + rest


def show_worker(worker: Any) -> None:
    """One worker."""
    show_state(worker)
    rows = (
        ("owner", worker["owner"]),
        ("engine", " ".join(str(worker["engine"].get(name) or "") for name in ("version", "dtype", "device"))),
        ("price", f"${price(worker['price_uusd_per_hour'])}/h"),
        ("version", worker["version"]),
        ("accepted rollouts, tokens", f"{worker['accepted_rollouts']}, {worker['accepted_tokens']}"),
        ("refused", counts(worker["refused"])),
        ("active hours", figure(worker["active_s"] / 3600, 2)),
        ("earned", dollars(worker["earned_uusd"])),
        ("paid out", dollars(worker["paid_out_uusd"])),
        ("control messages", worker["control"] or "not known"),
        ("last seen", when(worker["last_seen_at"])),
    )
    show_table(worker["name"], ("what", "figure"), rows)


def show_state(worker: Any) -> None:
    """One line."""
    reason = f": {worker['reason']}" if worker["reason"] else ""
    console.print(f"worker {worker['id']} ({worker['name']}) is {worker['state']}{reason}")


def invite_body(*, uses: int, owner: str, hours: float, price_ceiling: float | None, jobs: Sequence[str]) -> dict[str, Any]:
    """The body of POST /invites."""
    ceiling = None if price_ceiling is None else _uusd(price_ceiling, "--price-ceiling")
    return {
        "max_uses": uses,
        "owner": owner,
        "expires_in_s": hours * 3600,
        "price_ceiling_uusd_per_hour": ceiling,
        "jobs": list(jobs),
    }


def token_body(*, name: str, role: str, code: bool, spend_limit: float | None) -> dict[str, Any]:
    """The body of POST /tokens."""
    limit = None if spend_limit is None else _uusd(spend_limit, "--spend-limit")
    return {"name": name, "role": role, "rights": ["code"] if code else [], "spend_limit_uusd": limit}


def _uusd(usd: float, option: str) -> int:
    try:
        return usd_to_uusd(usd)
    except ValueError as error:
        raise CoordinatorError(f"{option}: {error}") from error


def reachable(url: str) -> str:
    """A URL that others can use: a coordinator that listens on every address does not know its own name."""
    return re.sub(r"://(0\.0\.0\.0|\[::\])(?=[:/]|$)", f"://{ANY_HOST}", url)


async def create_invite(client: RestClient, body: dict[str, Any]) -> Any:
    """POST the invite; jobs that it names must exist, or its workers would wait for ever."""
    for job in body["jobs"]:
        await client.get(f"/jobs/{job}")
    return await client.post("/invites", body)


def show_invite_code(invite: Any, url: str) -> None:
    """The code, once, with the line that a GPU owner types."""
    console.print(
        f"invite {invite['id']}: {invite['max_uses']} use(s), until {when(invite['expires_at'])}. The code is not shown again.",
        soft_wrap=True,
    )
    address = reachable(url)
    console.print(f"  echo2-worker join {address} --price 0.35 --invite {invite['code']}", soft_wrap=True)
    if address != url:
        console.print(f"  {ANY_HOST} stands for the name or address under which workers reach this host")


def show_invites(reply: Any) -> None:
    """All invites."""
    rows = (
        (
            i["id"],
            i["owner"],
            f"{i['used']}/{i['max_uses']}",
            when(i["expires_at"]),
            "revoked" if i["revoked_at"] else "",
            ", ".join(i["jobs"]) or "any",
        )
        for i in reply["invites"]
    )
    show_table("Invites", ("id", "owner", "used", "expires", "revoked", "jobs"), rows)


def show_token(token: Any) -> None:
    """The secret, once."""
    console.print(f"token {token['id']} ({token['role']}): it is not shown again")
    console.print(f"  {token['token']}", soft_wrap=True)


def show_tokens(reply: Any) -> None:
    """All tokens."""
    rows = (
        (t["id"], t["name"], t["role"], ", ".join(t["rights"]), when(t["created_at"]), "revoked" if t["revoked_at"] else "")
        for t in reply["tokens"]
    )
    show_table("Tokens", ("id", "name", "role", "rights", "created", "revoked"), rows)
