"""The documents of the control plane: what is written is read, anything else is refused with the place and the value."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from p2p.domain.batches import Batch
from p2p.domain.control_board import (
    Ask,
    Board,
    Page,
    Poll,
    Posted,
    Publication,
    page_from_bytes,
    page_to_bytes,
)
from p2p.domain.control_frames import MAX_MESSAGE
from p2p.domain.control_messages import (
    MAX_RANGES,
    Announcement,
    HaveMap,
    Neighbour,
    PeersReply,
    PeersRequest,
    Place,
    SignedBatch,
    may_say,
    ranges_of,
    topic_of,
)
from p2p.domain.manifest import Piece
from p2p.domain.signing import sign_batch
from p2p.errors import ControlRefused

COORDINATOR = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = COORDINATOR.public_key().public_bytes_raw().hex()
ANNOUNCEMENT = Announcement("job-1", 7, "ab" * 32, "cd" * 32).signed(COORDINATOR)
HAVES = HaveMap("ef" * 32, "12" * 32, 100, ((0, 3), (10, 1), (98, 2)), 1_000_000)
NEIGHBOUR = Neighbour("w-1", "ef" * 32, Place("203.0.113.5", 7001), "34" * 32, Place("203.0.113.5", 7002), 500_000, "abc_-=.def")
PEERS = PeersReply((NEIGHBOUR, Neighbour("w-2", "ee" * 32, None, "34" * 32, None, 0, "t.0")))
TEXT = Batch("job-1", 7, "delta", "cd" * 32, 0, "", (Piece("ab" * 32, 1),), is_last=True).to_json()
BATCH = SignedBatch(TEXT, sign_batch(COORDINATOR, TEXT))
DOCUMENTS = [ANNOUNCEMENT, SignedBatch('{"a":1}', "ab" * 64), HAVES, PeersRequest("job-1"), PEERS]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: type(document).__name__)
def test_what_is_written_is_read(document: Any) -> None:
    assert type(document).from_bytes(document.to_bytes()) == document


def test_the_text_of_an_announcement() -> None:
    assert (
        ANNOUNCEMENT.to_bytes()
        == (
            f'{{"digest":"{"ab" * 32}","job_id":"job-1","kind":"announcement","manifest":"{"cd" * 32}",'
            f'"signature":"{ANNOUNCEMENT.signature}","version":7}}'
        ).encode()
    )
    signed = f'echo2-announcement\n{{"digest":"{"ab" * 32}","job_id":"job-1","manifest":"{"cd" * 32}","version":7}}'
    assert COORDINATOR.sign(signed.encode()).hex() == ANNOUNCEMENT.signature


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: type(document).__name__)
def test_one_kind_is_not_read_as_another(document: Any) -> None:
    for other in {type(one) for one in DOCUMENTS} - {type(document)}:
        with pytest.raises(ControlRefused, match="is refused"):
            other.from_bytes(document.to_bytes())


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: type(document).__name__)
def test_only_the_canonical_spelling_is_read(document: Any) -> None:
    plain = json.loads(document.to_bytes())
    for spelling in (json.dumps(plain, sort_keys=True), json.dumps(plain, separators=(",", ":"), sort_keys=False) + " "):
        with pytest.raises(ControlRefused, match="canonical"):
            type(document).from_bytes(spelling.encode())
    with pytest.raises(ControlRefused, match="unknown"):
        type(document).from_bytes(json.dumps({**plain, "extra": 1}).encode())
    with pytest.raises(ControlRefused, match="missing"):
        type(document).from_bytes(json.dumps(dict(list(plain.items())[1:])).encode())


@given(st.binary(max_size=200), st.sampled_from(DOCUMENTS))
def test_noise_is_refused(noise: bytes, document: Any) -> None:
    with pytest.raises(ControlRefused):
        type(document).from_bytes(noise)


@given(st.sampled_from(DOCUMENTS), st.data())
def test_a_changed_byte_is_refused_or_changes_the_value(document: Any, data: st.DataObject) -> None:
    wire = bytearray(document.to_bytes())
    at = data.draw(st.integers(0, len(wire) - 1))
    wire[at] ^= data.draw(st.integers(1, 255))
    try:
        read = type(document).from_bytes(bytes(wire))
    except ControlRefused:
        return
    assert read != document
    assert read.to_bytes() == bytes(wire)


def test_a_signature_is_of_one_key_and_one_version() -> None:
    ANNOUNCEMENT.check(PUBLIC)
    other = Ed25519PrivateKey.generate().public_key().public_bytes_raw().hex()
    forged = Announcement("job-1", 8, "ab" * 32, "cd" * 32, ANNOUNCEMENT.signature)
    for announcement, key in (
        (ANNOUNCEMENT, other),
        (forged, PUBLIC),
        (Announcement("job-1", 7, "ab" * 32, "cd" * 32, "zz"), PUBLIC),
    ):
        with pytest.raises(ControlRefused, match="is not signed by key"):
            announcement.check(key)


def test_a_batch_is_passed_on_only_with_its_signature() -> None:
    text = '{"some":"batch"}'
    SignedBatch(text, sign_batch(COORDINATOR, text)).check(PUBLIC)
    with pytest.raises(ControlRefused, match="signature"):
        SignedBatch(text + " ", sign_batch(COORDINATOR, text)).check(PUBLIC)


def test_who_may_say_what() -> None:
    stranger, holder = "99" * 32, HAVES.holder
    for topic, document in (("job-1/versions", ANNOUNCEMENT), ("job-1/batches", BATCH)):
        assert may_say(topic, stranger, document.to_bytes(), coordinator=PUBLIC), "anybody passes on what the coordinator signed"
        assert not may_say(topic, PUBLIC, document.to_bytes(), coordinator=stranger)
    assert may_say("job-1/haves", holder, HAVES.to_bytes(), coordinator=PUBLIC)
    assert not may_say("job-1/haves", stranger, HAVES.to_bytes(), coordinator=PUBLIC)
    unread = SignedBatch("{}", sign_batch(COORDINATOR, "{}"))
    for payload in (b"", b"{}", PEERS.to_bytes(), PeersRequest("job-1").to_bytes(), unread.to_bytes()):
        for what in ("versions", "batches", "haves"):
            assert not may_say(topic_of("job-1", what), PUBLIC, payload, coordinator=PUBLIC), "nothing else is published"


@pytest.mark.parametrize(
    "topic", ["job-2/versions", "job-2/batches", "job-1/other", "versions", "batches", "job-1", "job-1/x/batches"]
)
def test_a_document_is_said_under_its_own_topic_only(topic: str) -> None:
    """A worker may not put what it holds, or what was signed for one job, where readers look for something else."""
    for document in (ANNOUNCEMENT, BATCH, HAVES):
        assert not may_say(topic, HAVES.holder, document.to_bytes(), coordinator=PUBLIC)
    own = {"versions": ANNOUNCEMENT, "batches": BATCH, "haves": HAVES}
    for what, document in own.items():
        for other in own.keys() - {what}:
            assert not may_say(topic_of("job-1", other), HAVES.holder, document.to_bytes(), coordinator=PUBLIC)


def test_topics_of_the_longest_job_id_are_topics() -> None:
    topic = topic_of("j" * 128, "versions")
    assert Publication.from_bytes(Publication(topic, "", b"").to_bytes()).topic == topic


def test_a_message_above_the_limit_is_neither_sent_nor_read() -> None:
    with pytest.raises(ControlRefused, match="above the limit of 60000"):
        SignedBatch("x" * MAX_MESSAGE, "ab" * 64).to_bytes()
    with pytest.raises(ControlRefused, match="above the limit of 60000"):
        SignedBatch.from_bytes(b" " * (MAX_MESSAGE + 1))


# --- have-maps


@given(st.integers(0, 2**200))
def test_ranges_say_what_the_mask_says(mask: int) -> None:
    have = HaveMap("ef" * 32, "12" * 32, 201, ranges_of(mask), 0)
    assert have.pieces == mask
    assert HaveMap.from_bytes(have.to_bytes()) == have


def test_too_many_ranges_understate() -> None:
    mask = sum(1 << (2 * i) for i in range(MAX_RANGES + 10)) | (3 << (2 * (MAX_RANGES + 20)))
    ranges = ranges_of(mask)
    assert len(ranges) == MAX_RANGES
    assert (2 * (MAX_RANGES + 20), 2) in ranges, "the long ones stay"
    have = HaveMap("ef" * 32, "12" * 32, 2**20, ranges, 2**40)
    assert have.pieces & ~mask == 0
    assert len(have.to_bytes()) < MAX_MESSAGE


def test_the_longest_have_map_fits() -> None:
    ranges = tuple((2**20 - 8 * MAX_RANGES + 4 * i, 3) for i in range(MAX_RANGES))
    assert len(HaveMap("ef" * 32, "12" * 32, 2**20, ranges, 2**40).to_bytes()) < MAX_MESSAGE


@pytest.mark.parametrize(
    "ranges",
    [
        [[1, 0]],
        [[0, 101]],
        [[100, 1]],
        [[5, 2], [3, 1]],
        [[0, 3], [3, 1]],
        [[0, 3], [2, 2]],
        [[0]],
        [[0, 1, 2]],
        [3],
        [[True, 1]],
        [[0, -1]],
    ],
)
def test_ranges_are_ascending_apart_and_within_the_row(ranges: list[Any]) -> None:
    plain = {**json.loads(HAVES.to_bytes()), "ranges": ranges}
    with pytest.raises(ControlRefused, match=r"ranges\["):
        HaveMap.from_bytes(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("host", "coordinator.example"),
        ("host", "../../etc"),
        ("host", ""),
        ("port", 0),
        ("port", 65536),
        ("port", True),
        ("port", None),
    ],
)
def test_places_are_literals_with_a_port(key: str, value: object) -> None:
    plain = json.loads(PEERS.to_bytes())
    plain["peers"][0]["bulk"][key] = value
    with pytest.raises(ControlRefused, match=rf"peers\[0\].bulk.{key}"):
        PeersReply.from_bytes(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode())


# --- the board

A, B = "aa" * 32, "bb" * 32
ALL = frozenset({"t", "u"})


def test_a_reader_sees_each_last_value_once() -> None:
    board = Board()
    board.put("t", A, "", b"1")
    board.put("t", B, "", b"2")
    board.put("u", A, "", b"3")
    page = board.page(ALL, 0)
    assert [(one.topic, one.author, one.payload) for one in page.values] == [("t", A, b"1"), ("t", B, b"2"), ("u", A, b"3")]
    assert board.page(ALL, page.after) == Page(page.after, ())
    board.put("t", A, "", b"4")
    assert [one.payload for one in board.page(ALL, page.after).values] == [b"4"]
    assert [one.payload for one in board.page(ALL, 0).values] == [b"2", b"3", b"4"]
    assert [one.payload for one in board.page(frozenset({"u"}), 0).values] == [b"3"]


def test_slots_are_values_apart() -> None:
    board = Board()
    board.put("t", A, "0", b"1")
    board.put("t", A, "1", b"2")
    assert [one.payload for one in board.page(ALL, 0).values] == [b"1", b"2"]


def test_pages_follow_each_other() -> None:
    board = Board()
    for number in range(10):
        board.put("t", A, str(number), bytes(100))
    found: list[int] = []
    after = 0
    while (page := board.page(ALL, after, most_bytes=250)).values:
        assert len(page.values) == 2
        found += [one.number for one in page.values]
        after = page.after
    assert found == list(range(1, 11))


def test_one_value_comes_even_if_it_is_larger_than_the_page() -> None:
    board = Board()
    board.put("t", A, "", bytes(100))
    assert len(board.page(ALL, 0, most_bytes=10).values) == 1


def test_a_number_of_another_life_starts_over() -> None:
    board = Board()
    board.put("t", A, "", b"1")
    assert [one.payload for one in board.page(ALL, 1000).values] == [b"1"]


def test_the_board_is_bounded_in_all_and_for_each_author() -> None:
    board = Board(most_bytes=1000, most_of_author=5)
    for number in range(8):
        board.put("t", A, str(number), b"a" * 10)
    board.put("t", B, "", b"b" * 10)
    assert [one.payload[:1] for one in board.page(ALL, 0).values] == [b"a"] * 5 + [b"b"]
    board.put("u", B, "", b"c" * 980)  # 1,040 bytes: four of the oldest go
    assert [len(one.payload) for one in board.page(ALL, 0).values] == [10, 10, 980]
    board.put("v", A, "", b"d" * 1000)
    assert board.page(ALL, 0).values == ()
    assert [one.payload for one in board.page(frozenset({"v"}), 0).values] == [b"d" * 1000]


def test_a_worker_has_few_slots_and_the_keepers_values_stay() -> None:
    board = Board(keeper=A, most_bytes=1000, most_of_author=3, most_slots=2)
    for number in range(8):
        board.put("t", A, str(number), b"a" * 100)
        board.put("t", B, str(number), b"b%d" % number)
    assert [one.payload for one in board.page(ALL, 0).values if one.author == B] == [b"b6", b"b7"]
    for topic in ("u", "v"):
        board.put(topic, B, "", b"b" + topic.encode())
    page = board.page(ALL | {"v"}, 0)
    assert [one.payload for one in page.values if one.author == B] == [b"b7", b"bu", b"bv"], "three of an author in all"
    board.put("t", B, "", b"c" * 500)
    page = board.page(ALL | {"v"}, 0)
    assert [one.author for one in page.values] == [A] * 8, "whoever fills the board loses its own values"
    for number in range(8, 11):
        board.put("t", A, str(number), b"a" * 100)
    assert [one.number for one in board.page(ALL, 0).values][-1] == board.page(ALL, 0).after
    assert len(board.page(ALL, 0).values) == 10, "its own oldest values go if nothing else is left"


@pytest.mark.parametrize("body", [Publication("t/1", "s", b"\x00\xff"), Poll(("t", "u"), 7), Ask("/echo2/peers/1", b"{}")])
def test_bodies_come_back(body: Any) -> None:
    assert type(body).from_bytes(body.to_bytes()) == body


def test_a_page_comes_back() -> None:
    page = Page(9, (Posted(8, "t", A, b"\x00"), Posted(9, "u", B, b"")))
    assert page_from_bytes(page_to_bytes(page)) == page


@pytest.mark.parametrize(
    ("read", "body", "why"),
    [
        (Publication.from_bytes, {"topic": "/t", "slot": "", "payload": ""}, "topic"),
        (Publication.from_bytes, {"topic": "t", "slot": " ", "payload": ""}, "slot"),
        (Publication.from_bytes, {"topic": "t", "slot": "", "payload": "a"}, "payload is not base64"),
        (Publication.from_bytes, {"topic": "t", "slot": "", "payload": "A" * 80_004}, "payload holds 60003 bytes"),
        (Publication.from_bytes, {"topic": "t", "slot": "", "payload": "A" * 120_000}, "above the limit of 120000"),
        (Poll.from_bytes, {"topics": ["t"] * 65, "after": 0}, "65 entries"),
        (Poll.from_bytes, {"topics": ["t"], "after": -1}, "after"),
        (Ask.from_bytes, {"protocol": "/other/1", "payload": ""}, "protocol"),
        (Ask.from_bytes, [], "object"),
        (page_from_bytes, {"after": 0, "values": [[1, "t", A]]}, r"values\[0\]"),
        (page_from_bytes, {"after": 0, "values": [[1, "t", "worker-1", ""]]}, r"values\[0\]\[2\]"),
    ],
)
def test_bodies_that_are_refused(read: Any, body: object, why: str) -> None:
    with pytest.raises(ControlRefused, match=why):
        read(json.dumps(body).encode())


def test_a_cleared_topic_is_empty_and_numbers_go_on() -> None:
    """A reader that polled before misses nothing that is put afterwards."""
    board = Board()
    board.put("t", A, "", b"1")
    board.put("u", A, "", b"2")
    after = board.page(ALL, 0).after
    board.clear("t")
    assert [posted.payload for posted in board.page(ALL, 0).values] == [b"2"]
    board.put("t", A, "", b"3")
    assert [posted.payload for posted in board.page(ALL, after).values] == [b"3"]
