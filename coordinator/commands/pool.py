"""What `echo2 worker`, `echo2 invite` and `echo2 token` send and show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coordinator.commands.output import console, dollars, figure, show_table, when
from coordinator.errors import CoordinatorError
from pricing.money import usd_to_uusd


def show_workers(reply: Any) -> None:
    """The pool."""
    rows = (
        (
            w["id"],
            w["name"],
            w["owner"],
            w["state"],
            f"{dollars(w['price_uusd_per_hour'])}/h",
            figure(w["tokens_per_s"], 0),
            w["version"],
            w["accepted_rollouts"],
            w["reason"] or w["activity"],
        )
        for w in reply["workers"]
    )
    show_table("Workers", ("id", "name", "owner", "state", "price", "tok/s", "version", "accepted", "now"), rows)


def show_worker(worker: Any) -> None:
    """One worker."""
    show_state(worker)
    rows = (
        ("engine", worker["engine"]),
        ("price", f"{dollars(worker['price_uusd_per_hour'])}/h"),
        ("version", worker["version"]),
        ("accepted rollouts, tokens", f"{worker['accepted_rollouts']}, {worker['accepted_tokens']}"),
        ("refused", worker["refused"]),
        ("active hours", figure(worker["active_s"] / 3600, 2)),
        ("cost (asked price)", dollars(worker["cost_estimate_uusd"])),
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


def show_invite_code(invite: Any, url: str) -> None:
    """The code, once, with the line that a GPU owner types."""
    console.print(
        f"invite {invite['id']}: {invite['max_uses']} use(s), until {when(invite['expires_at'])}. The code is not shown again."
    )
    console.print(f"  echo2-worker join {url} --price 0.35 --invite {invite['code']}", soft_wrap=True)


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
    show_table("Invites", ("id", "owner", "used", "expires", "", "jobs"), rows)


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
    show_table("Tokens", ("id", "name", "role", "rights", "created", ""), rows)
