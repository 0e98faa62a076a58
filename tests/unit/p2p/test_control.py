"""When the control plane sends, retries and changes its way: values, times in, decisions out."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p.domain.control import MAX_SLOTS, MAX_TOPICS, Outbox, RateLimit, Retry, Route, Seen, Silence
from p2p.domain.control_frames import MAX_MESSAGE, FrameReader, answer, frame, printable, read_answer, refusal
from p2p.errors import ControlRefused


def test_a_topic_gets_five_messages_a_second_and_the_last_value_wins() -> None:
    outbox = Outbox()
    sent: list[tuple[float, bytes]] = []
    for step in range(200):  # two seconds in steps of 10 ms, a new value in each
        now = step * 0.01
        outbox.put("t", "", str(step).encode(), now)
        sent += [(now, payload) for _, payload in outbox.take_due(now)]
    assert len(sent) == 10
    assert all(later - earlier >= 0.2 - 1e-9 for (earlier, _), (later, _) in pairwise(sent))
    assert sent[0] == (0.0, b"0")
    deadline = outbox.next_deadline()
    assert deadline is not None
    assert outbox.take_due(deadline) == [("t", b"199")]


def test_values_are_repeated_until_the_topic_is_retracted() -> None:
    outbox = Outbox()
    outbox.put("t", "a", b"1", 0.0)
    outbox.put("t", "b", b"2", 0.0)
    assert outbox.take_due(0.0) == [("t", b"1")]
    assert outbox.take_due(0.1) == []
    assert outbox.next_deadline() == pytest.approx(0.2)
    assert outbox.take_due(0.2) == [("t", b"2")]
    assert outbox.next_deadline() == pytest.approx(5.0)
    assert outbox.take_due(5.0) == [("t", b"1")]
    assert outbox.take_due(5.2) == [("t", b"2")]
    outbox.retract("t")
    assert outbox.next_deadline() is None
    assert outbox.take_due(99.0) == []


def test_retracting_does_not_lift_the_rate() -> None:
    outbox = Outbox()
    outbox.put("t", "", b"1", 0.0)
    assert outbox.take_due(0.0)
    outbox.retract("t")
    outbox.put("t", "", b"2", 0.05)
    assert outbox.take_due(0.05) == []
    assert outbox.take_due(0.2) == [("t", b"2")]


def test_each_topic_has_its_own_rate() -> None:
    outbox = Outbox()
    outbox.put("t", "", b"1", 0.0)
    outbox.put("u", "", b"2", 0.0)
    assert sorted(outbox.take_due(0.0)) == [("t", b"1"), ("u", b"2")]


def test_what_is_published_is_bounded() -> None:
    outbox = Outbox()
    with pytest.raises(ControlRefused, match="60001 bytes, above the limit of 60000"):
        outbox.put("t", "", bytes(MAX_MESSAGE + 1), 0.0)
    for slot in range(MAX_SLOTS + 1):
        outbox.put("t", str(slot), str(slot).encode(), 0.0)
    sent = {payload for step in range(100) for _, payload in outbox.take_due(step * 0.2)}
    assert sent == {str(slot).encode() for slot in range(1, MAX_SLOTS + 1)}
    for topic in range(MAX_TOPICS - 1):
        outbox.put(f"t{topic}", "", b"", 0.0)
    with pytest.raises(ControlRefused, match="retract one before one-more"):
        outbox.put("one-more", "", b"", 0.0)


def test_an_author_has_a_rate_and_a_burst() -> None:
    limit = RateLimit(rate=2.0, burst=3.0)
    assert [limit.allows("a", 0.0) for _ in range(5)] == [True, True, True, False, False]
    assert limit.allows("b", 0.0)
    assert not limit.allows("a", 0.4)
    assert limit.allows("a", 0.5)
    assert not limit.allows("a", 0.4), "a clock that runs back gives nothing"
    assert [limit.allows("a", 100.0) for _ in range(4)] == [True, True, True, False]


def test_authors_are_forgotten_when_there_are_too_many() -> None:
    limit = RateLimit(rate=1.0, burst=1.0, most_authors=2)
    assert limit.allows("a", 0.0)
    assert not limit.allows("a", 0.0)
    assert limit.allows("b", 0.0)
    assert limit.allows("c", 0.0)
    assert limit.allows("a", 0.0)
    assert not limit.allows("c", 0.0)


def test_seen_remembers_the_newest() -> None:
    seen = Seen(most=2)
    assert seen.is_new("a")
    assert seen.is_new("b")
    assert not seen.is_new("a")
    assert seen.is_new("c")
    assert seen.holds("a")
    assert not seen.holds("b")


def test_waits_double_up_to_the_most_and_start_over() -> None:
    retry = Retry(first_s=1.0, most_s=10.0, rng=Random(0))
    assert retry.is_due(0.0)
    waits = [retry.failed(0.0) for _ in range(6)]
    for wait, ceiling in zip(waits, [1, 2, 4, 8, 10, 10], strict=True):
        assert ceiling / 2 <= wait <= ceiling
    assert not retry.is_due(waits[-1] - 0.01)
    assert retry.is_due(waits[-1])
    retry.succeeded()
    assert retry.is_due(0.0)
    assert retry.failed(0.0) <= 1.0


def test_a_failed_route_is_tried_again_after_a_wait_that_grows() -> None:
    route = Route(first_s=10.0, most_s=40.0, rng=Random(0))
    assert route.takes_first(0.0)
    route.failed(0.0)
    route.failed(0.1)  # was on its way when the first failure came
    assert not route.takes_first(4.9)
    assert route.takes_first(10.0)
    route.failed(10.0)
    assert not route.takes_first(19.9)
    assert route.takes_first(30.0)
    route.failed(30.0)
    route.succeeded()
    assert route.takes_first(30.1)


def test_silence_is_what_the_second_way_brought_and_the_first_did_not() -> None:
    silence = Silence(grace_s=15.0)
    assert not silence.is_silent(1000.0), "nothing said is not silence"
    silence.first_brought("a")
    silence.second_brought("a", 0.0)
    assert not silence.is_silent(100.0)
    silence.second_brought("b", 100.0)
    assert not silence.is_silent(115.0)
    assert silence.is_silent(115.1)
    silence.first_brought("c")
    assert not silence.is_silent(200.0), "whatever it brings, it is not silent"


def test_missed_values_are_bounded() -> None:
    silence = Silence(grace_s=1.0, most=2)
    for number in range(5):
        silence.second_brought(str(number), float(number))
    assert not silence.is_silent(4.9 - 1.0 - 0.9)
    assert silence.is_silent(4.1)


# --- frames


@given(st.binary(max_size=300), st.data())
def test_a_frame_comes_back_however_it_is_cut(payload: bytes, data: st.DataObject) -> None:
    wire, reader, taken = frame(payload), FrameReader(), 0
    body = None
    while body is None:
        step = data.draw(st.integers(1, reader.wanted()))
        body = reader.take(wire[taken : taken + step])
        taken += step
    assert body == payload
    assert taken == len(wire)


def test_a_frame_is_a_little_endian_length_and_the_bytes() -> None:
    assert frame(b"abc") == b"\x03\x00\x00\x00abc"
    assert answer(b"abc") == b"\x04\x00\x00\x00\x00abc"
    assert refusal("no") == b"\x03\x00\x00\x00\x01no"


def test_an_empty_frame_is_whole_with_its_length() -> None:
    assert FrameReader().take(bytes(4)) == b""


def test_a_length_above_the_limit_is_refused_before_anything_is_kept() -> None:
    reader = FrameReader(most=10)
    with pytest.raises(ControlRefused, match="11 bytes is announced, above the limit of 10"):
        reader.take(b"\x0b\x00\x00\x00")


@pytest.mark.parametrize(("came", "missing"), [(b"", "its length"), (b"\x05\x00\x00\x00", "5 of 5 bytes")])
def test_an_end_before_the_length_is_a_failure(came: bytes, missing: str) -> None:
    reader = FrameReader()
    if came:
        assert reader.take(came) is None
    with pytest.raises(ControlRefused, match=f"ended before the message: {missing} missing"):
        reader.take(b"")


def test_more_than_wanted_is_refused() -> None:
    with pytest.raises(ControlRefused, match="5 bytes came where 4 were due"):
        FrameReader().take(bytes(5))


def test_answers_and_refusals_are_told_apart() -> None:
    assert read_answer(b"\x00abc") == b"abc"
    assert read_answer(b"\x00") == b""
    with pytest.raises(ControlRefused, match=r"the peer refused: no such job \?\[31m"):
        read_answer(b"\x01no such job \x1b[31m")
    for body in (b"", b"\x02abc"):
        with pytest.raises(ControlRefused, match="neither 0"):
            read_answer(body)


@pytest.mark.parametrize("make", [frame, answer])
def test_what_is_too_large_is_not_sent(make: object) -> None:
    assert callable(make)
    make(bytes(MAX_MESSAGE))
    with pytest.raises(ControlRefused, match="60001 bytes, above the limit of 60000"):
        make(bytes(MAX_MESSAGE + 1))


def test_words_of_strangers_are_short_and_printable() -> None:
    assert printable("a\nb\x00" + "c" * 1000) == "a?b?" + "c" * 496
