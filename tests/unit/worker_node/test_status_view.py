"""`echo2-worker status` and the checks of the other commands, in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from worker_node.adapters.status_file import Status
from worker_node.cli import app
from worker_node.status_view import lines


def status(**changes: Any) -> Status:
    """A worker that waits."""
    values: dict[str, Any] = {
        "pid": 7,
        "started_at": 90.0,
        "updated_at": 100.0,
        "url": "http://127.0.0.1:7700",
        "name": "rig",
        "worker_id": "w-1",
        "price_uusd_per_hour": 350_000,
        "engine": "torch",
        "working": False,
        "because": "no job runs",
        "phase": "serving",
    }
    return Status(**{**values, **changes})


def shown(**changes: Any) -> list[str]:
    """What is printed ten seconds later."""
    return list(lines(status(**changes), running=True, now=110.0))


def test_what_is_not_known_is_not_a_figure() -> None:
    """No measurement reads as such, never as zero."""
    assert "engine      torch, speed not measured yet" in shown()
    assert "weights     none loaded; newest none offered now" in shown()


def test_a_refused_price_is_told() -> None:
    """Beside the one in force."""
    assert not [line for line in shown() if line.startswith("price")]
    assert "price       too much" in shown(price_refused="too much")


def test_the_way_of_control_messages_is_told() -> None:
    """And what neighbours say, if they say anything."""
    assert not [line for line in shown() if line.startswith("control")]
    assert "control     libp2p" in shown(control="libp2p")
    words = "1 of 2 neighbours hold what is known of the newest transfer"
    assert f"control     https (--no-libp2p); {words}" in shown(control="https (--no-libp2p)", neighbours=words)


@pytest.mark.parametrize(
    ("state", "reason", "words"),
    [
        ("standby", "standby: no job runs", "coordinator says standby: no job runs"),
        ("active", "active", "coordinator says active"),
        ("quarantined", "too many faults", "coordinator says quarantined: too many faults"),
        ("active", "", "coordinator says active"),
    ],
)
def test_the_coordinators_word_is_said_once(state: str, reason: str, words: str) -> None:
    """Its reason often begins with the state."""
    assert words in shown(coordinator_state=state, coordinator_reason=reason)


def test_equal_notes_and_refusals_are_told_once() -> None:
    """The newest of equal notes; equal refusals with their number."""
    notes = [{"at": at, "code": "unreachable", "reason": "no route", "blame": "network"} for at in (90.0, 105.0)]
    refusal = {"code": "lease_closed", "reason": "cancelled", "blame": "job", "paid": True}
    account = {"earned_uusd": 1, "active_s": 1.0, "accepted_rollouts": 2, "accepted_tokens": 3, "refused_rollouts": 2}
    told = shown(notes=notes, account={**account, "refusals": [refusal, refusal]})
    assert [line for line in told if "no route" in line] == ["  5 s ago  unreachable: no route (fault: network)"]
    assert "  refused     2 times lease_closed: cancelled (fault: job, paid)" in told


def test_each_quote_says_how_its_pay_is_reckoned() -> None:
    """Tokens at a rate and waiting by the hour, or all active time while no rate was measured."""
    account = {"earned_uusd": 1_260_000, "active_s": 7200.0, "accepted_rollouts": 2, "accepted_tokens": 3, "refused_rollouts": 0}
    by_rate = {
        "job_id": "j",
        "tokens": 3_000_000,
        "paid_ms": 1_800_000,
        "uusd_per_million_tokens": 400_000,
        "uusd_per_idle_hour": 350_000,
        "owed_uusd": 1_375_000,
        "posted_uusd": 1_260_000,
        "ended_at": None,
        "ended_because": "",
    }
    by_time = {**by_rate, "uusd_per_million_tokens": None, "ended_at": 5.0, "ended_because": "its rate was measured"}
    told = shown(account={**account, "quotes": [by_rate, by_time], "refusals": []})
    assert (
        "  quote       job j: 3000000 tokens and 0.50 h at 0.4000 USD a million tokens, waiting 0.3500 USD/h = 1.3750 USD, "
        "1.2600 USD in the ledger"
    ) in told
    (line,) = [line for line in told if "its rate was measured" in line]
    assert "0.50 h at active time 0.3500 USD/h" in line


def test_payouts_stand_beside_the_earnings() -> None:
    account = {"earned_uusd": 3_000_000, "active_s": 3600.0, "accepted_rollouts": 2, "accepted_tokens": 3, "refused_rollouts": 0}
    paid = {"paid_out_uusd": 2_000_000, "payouts": [{"entry_id": "p", "at": 1.0, "uusd": 500_000, "note": "transfer 7"}]}
    (line,) = [x for x in shown(account={**account, **paid, "refusals": []}) if x.startswith("earnings")]
    assert "3.0000 USD (2.0000 USD paid out, last 0.5000 USD: transfer 7) for 1.00 h" in line


def test_install_service_refuses_options_that_join_does_not_have(tmp_path: Path) -> None:
    """They would only be found at boot."""
    common = ["install-service", "http://127.0.0.1:7700", "--unit-dir", str(tmp_path), "--state-dir", str(tmp_path / "state")]
    done = CliRunner().invoke(app, [*common, "--prize", "3"])
    assert (done.exit_code, list(tmp_path.glob("*.service"))) == (1, [])
    assert "--prize is no option of `echo2-worker join`" in done.output
    assert CliRunner().invoke(app, [*common, "--price", "3", "--slots=4"]).exit_code == 0


def test_bench_needs_a_model(tmp_path: Path) -> None:
    """One line with the folder's name."""
    done = CliRunner().invoke(app, ["bench", str(tmp_path)])
    assert done.exit_code == 1
    assert f"{tmp_path} is no Hugging Face directory" in done.output
