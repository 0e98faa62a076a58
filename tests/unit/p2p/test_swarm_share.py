"""Whose upload goes first when two versions share an uplink."""

from p2p.domain.swarm_share import Contender, next_transfer


def test_nobody_wants_to_send() -> None:
    assert next_transfer([], 0.0) is None


def test_the_older_version_goes_first() -> None:
    assert next_transfer([Contender("new", 8, 0.0), Contender("old", 7, 1.0)], 1.5) == "old"


def test_a_skipped_version_makes_room() -> None:
    assert next_transfer([Contender("new", 8, 0.0), Contender("old", 7, 0.0, is_skipped=True)], 0.0) == "new"
    assert next_transfer([Contender("old", 7, 0.0, is_skipped=True)], 0.0) == "old"


def test_who_was_passed_over_long_enough_gets_a_turn() -> None:
    contenders = [Contender("old", 7, 9.9), Contender("new", 8, 7.0), Contender("newer", 9, 6.0)]
    assert next_transfer(contenders, 10.0) == "newer"
    assert next_transfer(contenders[:2], 8.9) == "old"


def test_patience_is_not_for_the_skipped() -> None:
    assert next_transfer([Contender("old", 7, 0.0, is_skipped=True), Contender("new", 8, 99.0)], 100.0) == "new"
