"""Invites, options and the environment; identity files; the systemd unit; status in words."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.wire.signing import public_hex
from worker_node import config
from worker_node.adapters import identity
from worker_node.adapters.replies import read_refusal
from worker_node.adapters.status_file import Lock, Status, holder, is_running, read_status, write_status
from worker_node.domain.events import Outcome
from worker_node.errors import ConfigError, IdentityError
from worker_node.service_unit import quote, unit
from worker_node.status_view import lines

KEY = "ab" * 32
SECRET = "c2VjcmV0LXNlY3JldC1zZWNyZXQ"
CODE = f"echo2-invite-1.{KEY}.{SECRET}"


def test_an_invite_names_the_coordinator_and_is_sent_whole() -> None:
    """Surrounding white space is a copying accident."""
    invite = config.parse_invite(f"  {CODE}\n")
    assert (invite.coordinator_key, invite.code) == (KEY, CODE)
    assert SECRET not in repr(invite)


@pytest.mark.parametrize(
    "text",
    ["", "hello", f"echo2-invite-2.{KEY}.{SECRET}", f"echo2-invite-1.abc.{SECRET}", f"echo2-invite-1.{KEY}.short", f"{CODE}.x"],
)
def test_a_damaged_invite_is_refused_without_repeating_it(text: str) -> None:
    """The secret never appears in an error."""
    with pytest.raises(ConfigError) as caught:
        config.parse_invite(text)
    assert SECRET not in str(caught.value)


@given(st.text(max_size=200))
@settings(max_examples=100, deadline=None)
def test_no_text_breaks_the_parser(text: str) -> None:
    """Either an invite or a ConfigError."""
    with suppress(ConfigError):
        assert config.parse_invite(text).coordinator_key


def test_the_invite_comes_from_option_file_or_variable_in_this_order(tmp_path: Path) -> None:
    """None of them is no error: a known worker comes back without."""
    file = tmp_path / "invite"
    file.write_text(CODE + "\n")
    other = CODE.replace("ab" * 32, "cd" * 32)
    found = config.find_invite(None, file, {"ECHO2_INVITE": other})
    assert found is not None
    assert found.coordinator_key == KEY
    found = config.find_invite(None, None, {"ECHO2_INVITE": other})
    assert found is not None
    assert found.coordinator_key == "cd" * 32
    assert config.find_invite(None, None, {}) is None
    with pytest.raises(ConfigError, match="cannot be read"):
        config.find_invite(None, tmp_path / "absent", {})


def test_prices_are_micro_dollars() -> None:
    """Rounded once, bounded."""
    assert config.parse_price(0.35) == 350_000
    for wrong in (-1.0, 1e9, float("nan")):
        with pytest.raises(ConfigError, match="--price"):
            config.parse_price(wrong)


@pytest.mark.parametrize("value", ["nope:1", "canary", "canary:0", "canary:x", "canary:-1"])
def test_counts_name_the_option(value: str) -> None:
    """NAME:COUNT with a known name and a count of at least one."""
    assert config.parse_counts(["canary:2"], "--fault", ("canary",)) == {"canary": 2}
    with pytest.raises(ConfigError, match="--fault"):
        config.parse_counts([value], "--fault", ("canary",))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "llama"}, "--engine"),
        ({"kind": "torch", "dtype": "int8"}, "--dtype"),
        ({"kind": "torch", "tokens_per_s": 5.0}, "--tokens-per-s"),
        ({"kind": "torch", "faults": {"canary": 1}}, "--fault"),
    ],
)
def test_engine_options_are_checked(options: dict[str, Any], words: str) -> None:
    """Before anything is started."""
    with pytest.raises(ConfigError, match=words):
        config.engine_settings(**options)


@pytest.mark.parametrize(
    ("host", "port", "control_port", "words"),
    [
        ("example.org", 0, 0, "--peer-host"),
        ("[::1]", 0, 0, "--peer-host"),
        ("fe80::1%eth0", 2000, 0, "has a scope"),
        ("127.0.0.1", 80, 0, "--peer-port"),
        ("127.0.0.1", 2000, 80, "--control-port"),
        ("127.0.0.1", 0, 2000, "needs --peer-port"),
        ("127.0.0.1", 2000, 2000, "is --peer-port too"),
    ],
)
def test_peer_options_are_checked(host: str, port: int, control_port: int, words: str) -> None:
    """Only literals and unprivileged ports can be advertised, and two of them."""
    with pytest.raises(ConfigError, match=words):
        config.peer_settings(host, port, control_port)
    assert config.peer_settings("127.0.0.1", 2000, 2001).control_port == 2001


def test_peers_are_served_where_they_can_reach() -> None:
    """Loopback stays on loopback; anything else listens everywhere."""
    assert config.peer_settings("127.0.0.1", 2000).bind == "127.0.0.1"
    assert config.peer_settings("192.0.2.7", 2000).bind == "0.0.0.0"
    assert config.peer_settings("127.0.0.5", 2000).bind == "127.0.0.5"
    assert config.peer_settings("::1", 2000).bind == "::1"


def test_link_limits_are_bytes_and_none_means_no_limit() -> None:
    """8 Mbit/s are 1e6 bytes a second; a GB is 1e9 bytes."""
    assert config.link_settings(8, 0, 1.5) == config.LinkSettings(1e6, None, 1_500_000_000)
    for wrong in ((-1, 0, 0), (0, 0.01, 0), (0, 0, float("nan")), (0, float("inf"), 0)):
        with pytest.raises(config.ConfigError, match="must be 0"):
            config.link_settings(*wrong)
    assert config.peer_settings("2001:db8::7", 2000).bind == "::"


def test_a_known_worker_comes_back_without_an_invite(tmp_path: Path) -> None:
    """The pinned key is kept for that URL only."""
    config.remember_coordinator(tmp_path, "https://c.example/", KEY)
    assert config.read_coordinator(tmp_path, "https://c.example") == KEY
    with pytest.raises(ConfigError, match="never joined"):
        config.read_coordinator(tmp_path, "https://other.example")


def test_threads_are_limited_unless_the_owner_chose() -> None:
    """OMP_NUM_THREADS=1 before torch is imported."""
    environment = {"MKL_NUM_THREADS": "4"}
    config.limit_threads(environment)
    assert environment == {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "4", "TOKENIZERS_PARALLELISM": "false"}


def test_default_places_follow_the_xdg_variables(tmp_path: Path) -> None:
    """State and unit directories."""
    assert config.default_state_dir({"XDG_STATE_HOME": str(tmp_path)}) == tmp_path / "echo2-worker"
    assert config.default_unit_dir({"XDG_CONFIG_HOME": str(tmp_path)}) == tmp_path / "systemd" / "user"
    assert config.default_state_dir({}).parts[-3:] == (".local", "state", "echo2-worker")
    assert config.passphrase({"ECHO2_IDENTITY_PASSPHRASE": "x"}) == "x"
    assert config.passphrase({}) is None


def test_an_identity_is_made_once_and_private(tmp_path: Path) -> None:
    """0600 in a 0700 directory; the second start finds the same key."""
    state = tmp_path / "state"
    key, is_new = identity.load_or_create(state)
    again, is_new_again = identity.load_or_create(state)
    assert (is_new, is_new_again) == (True, False)
    assert public_hex(key) == public_hex(again)
    assert stat.S_IMODE(identity.identity_path(state).stat().st_mode) == 0o600
    assert stat.S_IMODE(state.stat().st_mode) == 0o700


def test_an_identity_others_can_read_is_refused(tmp_path: Path) -> None:
    """The fix is in the message."""
    identity.load_or_create(tmp_path)
    identity.identity_path(tmp_path).chmod(0o640)
    with pytest.raises(IdentityError, match="chmod 600"):
        identity.load(tmp_path)


def test_export_and_import_carry_the_key_under_a_passphrase(tmp_path: Path) -> None:
    """A wrong passphrase, an overwrite or a short passphrase is refused."""
    key, _ = identity.load_or_create(tmp_path / "one")
    file = tmp_path / "backup.pem"
    with pytest.raises(IdentityError, match="at least 8"):
        identity.export_identity(tmp_path / "one", file, "short")
    identity.export_identity(tmp_path / "one", file, "a long passphrase")
    assert b"ENCRYPTED" in file.read_bytes()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with pytest.raises(IdentityError, match="exists already"):
        identity.export_identity(tmp_path / "one", file, "a long passphrase")
    with pytest.raises(IdentityError, match="wrong passphrase"):
        identity.import_identity(tmp_path / "two", file, "another passphrase", replace=False)
    brought = identity.import_identity(tmp_path / "two", file, "a long passphrase", replace=False)
    assert public_hex(brought) == public_hex(key) == public_hex(identity.load(tmp_path / "two"))
    with pytest.raises(IdentityError, match="--replace"):
        identity.import_identity(tmp_path / "two", file, "a long passphrase", replace=False)
    identity.import_identity(tmp_path / "two", file, "a long passphrase", replace=True)
    with pytest.raises(IdentityError, match="cannot be read"):
        identity.import_identity(tmp_path / "three", tmp_path / "absent", "a long passphrase", replace=False)
    with pytest.raises(IdentityError, match="no identity"):
        identity.load(tmp_path / "four")


def test_one_worker_a_state_directory(tmp_path: Path) -> None:
    """The lock tells a live worker from a dead one's files."""
    assert not is_running(tmp_path)
    lock = Lock(tmp_path)
    lock.take()
    assert is_running(tmp_path)
    with pytest.raises(ConfigError, match="another worker"):
        Lock(tmp_path).take(tries=1)
    assert holder(tmp_path) == os.getpid()
    lock.release()
    lock.release()
    assert not is_running(tmp_path)
    assert holder(tmp_path) is None, "the number of a process that is gone may be another's by now"


def test_a_lock_that_cannot_be_opened_is_told_in_one_line(tmp_path: Path) -> None:
    """Not a traceback."""
    with pytest.raises(ConfigError, match="cannot be opened"):
        Lock(tmp_path / "absent").take()


def test_a_status_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk: the old status stands, and no scrap is left beside it."""
    write_status(tmp_path, status())

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_status(tmp_path, status(pid=78))
    assert read_status(tmp_path) == status()
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def status(**changes: Any) -> Status:
    values: dict[str, Any] = {
        "pid": 77,
        "started_at": 0.0,
        "updated_at": 100.0,
        "url": "https://c",
        "name": "w",
        "worker_id": "w-1",
        "price_uusd_per_hour": 350_000,
        "engine": "torch",
        "working": True,
        "because": "generating 3 completions",
        "phase": "joined",
    }
    return Status(**{**values, **changes})


def test_a_status_is_written_and_read_whole(tmp_path: Path) -> None:
    """None before the first worker; an unreadable file says so."""
    assert read_status(tmp_path) is None
    write_status(tmp_path, status())
    assert read_status(tmp_path) == status()
    (tmp_path / "status.json").write_text('{"pid": 1}')
    with pytest.raises(ConfigError, match="cannot be read"):
        read_status(tmp_path)


@pytest.mark.parametrize(
    ("changes", "running", "now", "verdict"),
    [
        ({}, True, 101.0, "working: generating 3 completions"),
        ({"working": False, "because": "fetching version 3"}, True, 101.0, "not working, because fetching version 3"),
        ({}, True, 200.0, "not working, because process 77 has not reported for 100 s"),
        ({}, False, 101.0, "not working, because process 77 is dead (it ended without saying why)"),
        ({"ended": "SIGTERM"}, False, 101.0, "not working, because SIGTERM"),
    ],
)
def test_the_verdict_comes_first(changes: dict[str, Any], running: bool, now: float, verdict: str) -> None:
    """Working, or not working because."""
    assert next(lines(status(**changes), running=running, now=now)) == verdict


def test_earnings_and_refusals_are_told_in_words() -> None:
    """What is owed, for how long, what was refused and whose fault it was."""
    refusal = {
        "at": 1.0,
        "job_id": "j",
        "code": "lease_dead",
        "reason": "the learner moved on",
        "blame": "coordinator",
        "paid": True,
    }
    account = {
        "accepted_rollouts": 5,
        "accepted_tokens": 900,
        "refused_rollouts": 1,
        "active_s": 7200.0,
        "earned_uusd": 700_000,
        "refusals": [refusal],
    }
    note = {"at": 90.0, "code": "fetch_failed", "reason": "no progress", "blame": "network"}
    text = "\n".join(
        lines(status(account=account, notes=[note], fetch_percent=40.0, coordinator_state="active"), running=True, now=101.0)
    )
    assert "0.7000 USD for 2.00 h: 5 completions (900 tokens) accepted, 1 refused" in text
    assert "lease_dead: the learner moved on (fault: coordinator, paid)" in text
    assert "11 s ago  fetch_failed: no progress (fault: network)" in text
    assert "(40 % fetched)" in text
    later = "\n".join(
        lines(status(notes=[{**note, "at": -500.0, "reason": "no route"}, {**note, "at": -9000.0}]), running=True, now=101.0)
    )
    assert "10 min ago" in later
    assert "2.5 h ago" in later
    assert "not asked yet" in later


def test_the_unit_joins_at_boot_and_is_hardened() -> None:
    """Arguments are taken literally; a fenced worker is not restarted; a stop is given time to drain."""
    text = unit(
        ["/opt/echo2-worker", "join", "https://c", "--name", 'a "b" $c %d'], state_dir=Path("/var/lib/w"), drain_s=120, gpu=False
    )
    assert 'ExecStart="/opt/echo2-worker" "join" "https://c" "--name" "a \\"b\\" $$c %%d"' in text
    for line in (
        "NoNewPrivileges=yes",
        "ProtectSystem=strict",
        "PrivateDevices=yes",
        "RestartPreventExitStatus=4",
        "TimeoutStopSec=150",
        'ReadWritePaths="/var/lib/w"',
    ):
        assert line in text.splitlines()
    assert "PrivateDevices" not in unit(["x"], state_dir=Path("/s"), drain_s=1, gpu=True)
    with pytest.raises(ValueError, match="control character"):
        quote("a\nExecStartPre=evil")


@pytest.mark.parametrize(
    ("status_code", "headers", "body", "outcome", "retry_s"),
    [
        (502, {"retry-after": "7"}, b"<html>", Outcome.TRY_AGAIN, 7.0),
        (404, {}, b"", Outcome.REFUSED, 0.0),
        (408, {"retry-after": "Mon, 1 Jan"}, b"{}", Outcome.TRY_AGAIN, 0.0),
        (503, {"retry-after": "99999999"}, b"", Outcome.TRY_AGAIN, 3600.0),
    ],
)
def test_replies_without_a_problem_document_mean_what_their_status_means(
    status_code: int, headers: dict[str, str], body: bytes, outcome: Outcome, retry_s: float
) -> None:
    """Proxies answer in their own way."""
    refusal = read_refusal(status_code, headers, body)
    assert (refusal.outcome, refusal.retry_after_s, refusal.code) == (outcome, retry_s, f"http_{status_code}")
