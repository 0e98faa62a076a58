"""Presence: signs of life between flushes, and when silence counts."""

from __future__ import annotations

from coordinator.service.worker_presence import Heard, Presence


def test_each_worker_is_saved_once_with_its_newest_sign() -> None:
    presence = Presence()
    for at in (1.0, 2.0, 3.0):
        presence.touch("a", epoch=1, at=at)
    presence.touch("b", epoch=1, at=1.5)
    assert presence.unsaved == 2
    assert [(h.worker_id, h.at) for h in presence.take_unsaved(1)] == [("a", 3.0)]
    assert [(h.worker_id, h.at) for h in presence.take_unsaved(10)] == [("b", 1.5)]
    assert presence.take_unsaved(10) == []


def test_a_touch_keeps_what_the_beat_said_within_a_session() -> None:
    presence = Presence()
    presence.hear(Heard("a", 1, 1.0, tokens_per_s=50.0, activity="generating"))
    presence.touch("a", epoch=1, at=2.0)
    heard = presence.get("a")
    assert heard is not None
    assert (heard.at, heard.tokens_per_s, heard.activity) == (2.0, 50.0, "generating")
    presence.touch("a", epoch=2, at=3.0)
    heard = presence.get("a")
    assert heard is not None
    assert heard.tokens_per_s is None, "another session is another engine"


def test_a_forgotten_worker_is_neither_present_nor_saved() -> None:
    presence = Presence()
    presence.touch("a", epoch=1, at=1.0)
    presence.forget("a")
    presence.forget("a")
    assert presence.get("a") is None
    assert presence.unsaved == 0
    assert presence.earliest_loss(10.0) is None


def test_silence_that_is_excused_moves_the_loss() -> None:
    presence = Presence()
    presence.remember(Heard("a", 1, 100.0, excused_until=200.0))
    presence.remember(Heard("b", 1, 180.0))
    assert presence.unsaved == 0
    assert presence.earliest_loss(35.0) == 200.0
    presence.touch("a", epoch=1, at=190.0)
    assert presence.earliest_loss(35.0) == 215.0


def test_only_the_newest_request_that_work_can_answer_counts_as_waiting():
    """One that asks another job, with older weights than it confirmed, or for what nobody can give it, avoids work."""
    presence = Presence()
    presence.asks("w", "a", 3, at=10.0)
    assert (presence.asked_at("w", "a"), presence.asked_at("w", "b")) == (10.0, 0.0)
    presence.asks("w", "b", 0, at=11.0)
    assert (presence.asked_at("w", "a"), presence.asked_at("w", "b")) == (0.0, 11.0)
    presence.asked_in_vain("w", "a")
    assert presence.asked_at("w", "b") == 11.0
    presence.asked_in_vain("w", "b")
    assert presence.asked_at("w", "b") == 0.0
    presence.has_fetched("w", "a", 4)
    presence.has_fetched("w", "a", 2)
    presence.asks("w", "a", 3, at=12.0)
    assert presence.asked_at("w", "a") == 0.0
    presence.asks("w", "a", 4, at=13.0)
    assert presence.asked_at("w", "a") == 13.0
    presence.forget("w")
    presence.asks("w", "a", 0, at=14.0)
    assert presence.asked_at("w", "a") == 14.0
