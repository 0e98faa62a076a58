"""Strikes, bans, and how they are forgotten."""

from dataclasses import replace

from p2p.domain.swarm_blame import Blame
from p2p.domain.swarm_limits import SwarmLimits

LIMITS = SwarmLimits()


def test_a_ban_doubles_with_each_strike_up_to_a_quarter_of_the_patience() -> None:
    blame = Blame(LIMITS)
    assert [blame.strike("a", 1, 10.0) - 10.0 for _ in range(5)] == [1.0, 2.0, 4.0, 7.5, 7.5]


def test_damage_counts_threefold() -> None:
    assert Blame(LIMITS).strike("a", 3, 0.0) == 4.0


def test_one_strike_is_forgotten_per_half_minute() -> None:
    blame = Blame(LIMITS)
    blame.strike("a", 3, 0.0)
    assert [blame.strikes("a", now) for now in (0.0, 29.9, 30.0, 60.0, 1e6)] == [3, 3, 2, 1, 0]
    assert blame.strikes("b", 0.0) == 0


def test_a_ban_holds_until_its_time() -> None:
    blame = Blame(LIMITS)
    assert blame.banned_until("a") == float("-inf")
    blame.ban("a", 5.0)
    assert blame.banned_until("a") == 5.0


def test_records_are_bounded() -> None:
    blame = Blame(replace(LIMITS, records=2))
    for peer in "abc":
        blame.strike(peer, 1, 0.0)
    assert [blame.strikes(peer, 0.0) for peer in "abc"] == [0, 1, 1]
