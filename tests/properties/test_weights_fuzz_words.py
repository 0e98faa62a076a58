"""The documents and frames of strangers, damaged: manifests, hops, batches, tickets, bulk frames, control messages. 10,000 of each with --long.

For each case: the package's own error in one line, or a value that means what was sent; little time; no more memory than was declared.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from dataclasses import replace
from typing import Any

import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import strategies as st

from p2p.domain import bulk_frames as frames
from p2p.domain.batches import Batch, Chain, text_hash
from p2p.domain.bulk_hello import Hello
from p2p.domain.control_board import Ask, Page, Poll, Posted, Publication, page_from_bytes, page_to_bytes
from p2p.domain.control_frames import MAX_MESSAGE, FrameReader, answer, frame, read_answer
from p2p.domain.control_messages import (
    Announcement,
    HaveMap,
    Neighbour,
    PeersReply,
    PeersRequest,
    Place,
    SignedBatch,
    may_say,
)
from p2p.domain.hops import Hop, hops_of
from p2p.domain.manifest import Edge, FileEntry, Manifest, Piece, Tensor
from p2p.domain.signing import check_batch, check_hop, check_manifest, sign_batch, sign_hop, sign_manifest
from p2p.domain.tickets import Ticket, read_ticket, sign_ticket
from p2p.errors import (
    BatchRefused,
    ControlRefused,
    FrameRefused,
    ManifestError,
    TicketError,
)
from tests.factories_fuzz import bounded, damaged, fuzz, in_one_line, is_canonical, plain, restructured, scaled, texts

KEY = Ed25519PrivateKey.from_private_bytes(b"\x07" * 32)
PUBLIC = KEY.public_key().public_bytes_raw().hex()

# --- manifests, hops, batches


def digest(seed: int) -> str:
    return blake3(seed.to_bytes(4, "little")).hexdigest()


def row(*sizes: int, seed: int = 0) -> tuple[Piece, ...]:
    return tuple(Piece(digest(seed + index), size) for index, size in enumerate(sizes))


TENSORS = (Tensor("a.weight", "BF16", (100, 7), 1400), Tensor("b.scale", "F32", (), 4), Tensor("c", "BOOL", (8,), 8))
MANIFEST = Manifest(
    job_id="job-1",
    version=7,
    digest=digest(1),
    tensors=TENSORS,
    aliases={"head.weight": "a.weight"},
    files=(FileEntry("config.json", row(20, seed=40)), FileEntry("tokenizer.json", row(9, 3, seed=50))),
    canary_ids=(1, 2, 3),
    edges=(
        Edge("delta", 6, digest(2), row(100, 50, seed=60), digest(3)),
        Edge("raw", None, None, row(1000, 412, seed=70)),
        Edge("planes", None, None, row(900, seed=80), digest(4)),
    ),
)
TEXT = MANIFEST.to_json()
BATCHES = tuple(
    Batch("job-1", 7, "delta", digest(2), number, "", row(*[65536] * 3, seed=90 + 10 * number), number == 2) for number in range(3)
)


def chained() -> list[str]:
    """The three batches as one transfer."""
    told: list[str] = []
    for batch in BATCHES:
        told.append(replace(batch, previous=text_hash(told[-1]) if told else "").to_json())
    return told


CHAIN = chained()


def test_the_honest_forms_are_read() -> None:
    """What is damaged below is valid as it is; otherwise every case would be refused for a reason of its own."""
    assert Manifest.from_json(TEXT) == MANIFEST
    assert [Hop.from_json(hop.to_json()) for hop in hops_of(MANIFEST)] == list(hops_of(MANIFEST))
    chain = Chain(text_hash(CHAIN[0]), PUBLIC)
    assert [len(chain.accept(text, sign_batch(KEY, text))) for text in CHAIN] == [3, 3, 3]


@scaled(500)
def test_manifests(cases: int) -> None:
    signature = sign_manifest(KEY, TEXT)

    @fuzz(cases, texts(TEXT))
    def check(text: str) -> None:
        with bounded(50 * len(text)):
            if text != TEXT:
                with pytest.raises(ManifestError):
                    check_manifest(PUBLIC, text, signature)
            try:
                read = Manifest.from_json(text)
            except ManifestError as error:
                return in_one_line(error)
        assert is_canonical(text)
        assert (read == MANIFEST) == (text == TEXT)
        _is_sane(read)
        return None


WIDTHS = {"BF16": 2, "BOOL": 1, "F32": 4}


def _is_sane(read: Manifest) -> None:
    """What every manifest promises to those who act on it."""
    names = [tensor.name for tensor in read.tensors]
    assert names
    assert names == sorted(set(names))
    assert all(tensor.nbytes == math.prod(tensor.shape) * WIDTHS[tensor.dtype] for tensor in read.tensors)
    assert set(read.aliases.values()) <= set(names)
    assert not set(read.aliases) & set(names)
    assert {entry.name for entry in read.files} <= {"config.json", "tokenizer.json"}
    assert len({(edge.encoding, edge.base_digest) for edge in read.edges}) == len(read.edges)
    for edge in read.edges:
        _is_a_row(edge.pieces, read.nbytes + read.nbytes // 64 + (1 << 20))
        assert (edge.base_version is None) == (edge.base_digest is None)
        assert edge.base_version is None or (0 <= edge.base_version <= read.version and edge.encoding not in ("raw", "planes"))
        assert edge.encoding != "raw" or edge.size == read.nbytes


def _is_a_row(row_of: tuple[Piece, ...], most: int) -> None:
    assert all(0 < piece.size <= 16 << 20 and len(bytes.fromhex(piece.digest)) == 32 for piece in row_of)
    assert sum(piece.size for piece in row_of) <= most
    assert len({piece.digest for piece in row_of}) == len(set(row_of)), "one piece of two sizes"


@scaled(300)
def test_hops(cases: int) -> None:
    hop = hops_of(MANIFEST)[0]
    text = hop.to_json()
    signature = sign_hop(KEY, text)

    @fuzz(cases, texts(text))
    def check(found: str) -> None:
        with bounded(50 * len(found)):
            if found != text:
                with pytest.raises(ManifestError):
                    check_hop(PUBLIC, found, signature)
            try:
                read = Hop.from_json(found)
                read.check_fits(MANIFEST)
            except ManifestError as error:
                return in_one_line(error)
        assert is_canonical(found)
        assert (read == hop) == (found == text)
        assert (read.job_id, read.layout) == (MANIFEST.job_id, MANIFEST.layout)
        assert read.version <= MANIFEST.version
        _is_a_row(read.edge.pieces, 1412 + 1412 // 64 + (1 << 20))
        return None


@st.composite
def nearly(draw: st.DrawFn, text: str) -> str:
    """A valid batch that differs in one field: one of another edge, another place, or another chain."""
    batch = Batch.from_json(text)
    other = draw(
        st.sampled_from(
            [
                {"previous": digest(5)},
                {"previous": text_hash(CHAIN[2])},
                {"number": batch.number + 1, "previous": text_hash(text)},
                {"version": 8},
                {"job_id": "job-2"},
                {"base_digest": None},
                {"base_digest": digest(6)},
                {"encoding": "planes"},
                {"pieces": batch.pieces[::-1]},
                {"pieces": (*batch.pieces, Piece(batch.pieces[0].digest, 5))},
                {"pieces": row(*[16 << 20] * 2, seed=500)},
                {"pieces": (), "is_last": True},
            ]
        )
    )
    return replace(batch, **other).to_json()


@scaled(500)
def test_batches(cases: int) -> None:
    """Damaged and under the old signature, or signed again, as a coordinator gone wrong would: refused, and nothing has changed."""

    def of(number: int) -> st.SearchStrategy[tuple[int, str]]:
        return st.tuples(st.just(number), texts(CHAIN[number]) | nearly(CHAIN[number]))

    @fuzz(cases, st.integers(0, 2).flatmap(of))
    def check(case: tuple[int, str]) -> None:
        number, text = case
        chain = Chain(text_hash(CHAIN[0]), PUBLIC, most_bytes=20 << 20)
        for before in CHAIN[:number]:
            chain.accept(before, sign_batch(KEY, before))
        state = (chain.pieces, chain.next_number, chain.is_complete)
        with bounded(50 * len(text)):
            if text != CHAIN[number]:
                with pytest.raises(BatchRefused):
                    check_batch(PUBLIC, text, sign_batch(KEY, CHAIN[number]))
            try:
                added = chain.accept(text, sign_batch(KEY, text))
            except BatchRefused as error:
                in_one_line(error)
                assert (chain.pieces, chain.next_number, chain.is_complete) == state
                return
        assert is_canonical(text)
        read = Batch.from_json(text)
        assert read.edge == BATCHES[0].edge
        assert text in CHAIN[:number] or read.number == number
        assert text in CHAIN or read.previous == text_hash(CHAIN[number - 1]), "it follows what came before"
        assert number > 0 or text == CHAIN[0], "the first one names the transfer"
        _is_a_row(chain.pieces, 20 << 20)
        assert added == (read.pieces if read.number == number else ())
        assert sum(piece.size for piece in chain.pieces) <= 20 << 20
        return


@scaled(60, 3000)
def test_batches_in_any_order_with_strangers_between(cases: int) -> None:
    """Reordered, repeated, forged and foreign ones: what is accepted at last is the row, in order, or a beginning of it."""
    foreign = replace(BATCHES[0], version=8).to_json()
    signed = [(text, sign_batch(KEY, text)) for text in (*CHAIN, foreign)]
    forged = [(text, sign_batch(Ed25519PrivateKey.generate(), text)) for text in CHAIN]
    swapped = [(CHAIN[0], signed[1][1]), (CHAIN[1], signed[0][1])]

    @fuzz(cases, st.lists(st.sampled_from([*signed, *forged, *swapped]), max_size=12))
    def check(come: list[tuple[str, str]]) -> None:
        chain = Chain(text_hash(CHAIN[0]), PUBLIC)
        for text, signature in come:
            try:
                chain.accept(text, signature)
            except BatchRefused as error:
                in_one_line(error)
            else:
                assert (text, signature) in signed[:3]
        whole = tuple(piece for batch in BATCHES for piece in batch.pieces)
        assert chain.pieces == whole[: 3 * chain.next_number]


# --- what peers say on bulk connections (over live sockets: tests/integration/p2p/faults/test_fuzz_bytes.py)


def same_frame(data: bytes) -> tuple[frames.Head, bytes]:
    head = frames.read_head(data)
    return head, data[frames.HEAD_BYTES : frames.HEAD_BYTES + head.length]


FRAMES = [
    frames.have(1, 0b1011 << 70, queue=3, uplink=1e6, serves=True),
    frames.have(1, int("10" * 500, 2), queue=0, uplink=1e6, serves=False),
    frames.batch(2, CHAIN[0], sign_batch(KEY, CHAIN[0])),
    frames.frame(frames.REQUEST, transfer=1, a=5),
    frames.frame(frames.KNOWS, bytes(32), transfer=1, a=2),
    frames.frame(frames.DATA, bytes(100), transfer=1, a=2, b=16384),
    frames.bye("enough"),
]


@st.composite
def sets_of_pieces(draw: st.DrawFn) -> bytes:
    """A HAVE frame whose numbers are anything."""
    number = st.sampled_from([0, 1, 2, 3, 70, (1 << 20) - 1, 1 << 20, 1 << 30, (1 << 32) - 1]).map(
        lambda n: n.to_bytes(4, "little")
    )
    numbers = b"".join(draw(st.lists(number, max_size=8)))
    payload = bytes([draw(st.integers(0, 2))]) + numbers + draw(st.sampled_from([b"", b"\1", b"\xff" * 3]))
    return frames.frame(frames.HAVE, payload, transfer=1)


@st.composite
def signed_batches(draw: st.DrawFn) -> bytes:
    """A BATCH frame of which one bit of the signature or of the text is another."""
    whole = bytearray(FRAMES[2])
    whole[draw(st.integers(frames.HEAD_BYTES, frames.HEAD_BYTES + 200))] ^= 1 << draw(st.integers(0, 6))
    return bytes(whole)


@scaled(300)
def test_bulk_frames(cases: int) -> None:
    @fuzz(cases, st.sampled_from(FRAMES).flatmap(damaged) | sets_of_pieces() | signed_batches())
    def check(data: bytes) -> None:
        data = data.ljust(frames.HEAD_BYTES, b"\0")
        with bounded(len(data) + (1 << 20)):
            try:
                head, payload = same_frame(data)
                assert head.length <= frames.PART_BYTES
                _read_payload(head.kind, payload)
            except FrameRefused as error:
                in_one_line(error)


def _read_payload(kind: int, payload: bytes) -> None:
    if kind == frames.HAVE:
        mask = frames.unpack_mask(payload)
        assert 0 <= mask.bit_length() <= 1 << 20
        assert frames.unpack_mask(frames.pack_mask(mask)) == mask
    elif kind == frames.BATCH and len(payload) > frames.SIGNATURE_BYTES:
        text, signature = frames.read_batch(payload)
        chain = Chain(text_hash(CHAIN[0]), PUBLIC)
        try:
            chain.accept(text, signature)
        except BatchRefused as error:
            in_one_line(error)
        assert chain.next_number == ((text, signature) == (CHAIN[0], sign_batch(KEY, CHAIN[0])))
    elif kind == frames.BYE:
        assert frames.reason_of(payload).isprintable()


TICKET = sign_ticket(KEY, Ticket("t-1", "w-a", "ab" * 32, "w-b", "job", 2000))


@scaled(300)
def test_tickets(cases: int) -> None:
    """Only the coordinator's very words are a ticket."""
    honest = read_ticket(TICKET, public_key=PUBLIC, server="w-b", now=1999.0)
    body = base64.urlsafe_b64decode(TICKET.partition(".")[0]).decode()

    def signed_body(text: str) -> str:
        return f"{base64.urlsafe_b64encode(text.encode('utf-8', 'replace')).decode()}.{TICKET.partition('.')[2]}"

    @fuzz(cases, damaged(TICKET.encode()).map(lambda data: data.decode("latin-1")) | texts(body).map(signed_body))
    def check(text: str) -> None:
        with bounded(8192):
            try:
                read = read_ticket(text, public_key=PUBLIC, server="w-b", now=1999.0)
            except TicketError as error:
                return in_one_line(error)
        assert read == honest
        assert bytes.fromhex(text.partition(".")[2]) == bytes.fromhex(TICKET.partition(".")[2])
        return None


@scaled(300)
def test_hellos(cases: int) -> None:
    whole = Hello(TICKET, "ab" * 64).to_bytes()

    @fuzz(cases, damaged(whole) | restructured(whole.decode()).map(lambda text: text.encode("utf-8", "replace")))
    def check(payload: bytes) -> None:
        with bounded(8192):
            try:
                hello = Hello.from_bytes(payload)
            except FrameRefused as error:
                return in_one_line(error)
        plain(payload)
        assert (hello.to_bytes() == whole) <= (json.loads(payload) == json.loads(whole))
        return None


# --- the control plane

NEIGHBOUR = Neighbour("w-1", "ef" * 32, Place("203.0.113.5", 7001), "34" * 32, Place("2001:db8::5", 7002), 500_000, TICKET)
DOCUMENTS: list[Any] = [
    Announcement("job-1", 7, "ab" * 32, "cd" * 32).signed(KEY),
    SignedBatch(CHAIN[0], sign_batch(KEY, CHAIN[0])),
    HaveMap("ef" * 32, "12" * 32, 100, ((0, 3), (10, 1), (98, 2)), 1_000_000),
    PeersRequest("job-1"),
    PeersReply((NEIGHBOUR, replace(NEIGHBOUR, worker_id="w-2", bulk=None, control=None))),
    Publication("slot", "job-1/haves", b"payload"),
    Poll(("job-1/haves", "job-1/versions"), 17),
    Ask("/echo2/peers/1", b"\0\1\2"),
]


@scaled(500)
def test_control_documents(cases: int) -> None:
    def of(document: Any) -> st.SearchStrategy[tuple[Any, bytes]]:
        whole = document.to_bytes()
        spoilt = damaged(whole) | restructured(whole.decode()).map(lambda text: text.encode("utf-8", "replace"))
        return st.tuples(st.just(document), spoilt)

    @fuzz(cases, st.sampled_from(DOCUMENTS).flatmap(of))
    def check(case: tuple[Any, bytes]) -> None:
        document, data = case
        with bounded(60 * len(data)):
            says = any(may_say(f"job-1/{what}", "ef" * 32, data, coordinator=PUBLIC) for what in ("versions", "batches", "haves"))
            try:
                read = type(document).from_bytes(data)
            except ControlRefused as error:
                in_one_line(error)
                return
        if isinstance(document, Announcement | SignedBatch):
            assert says == (read == document), "only what the coordinator signed is passed on"
        if not isinstance(document, Publication | Poll | Ask):
            assert is_canonical(data.decode())
        if isinstance(document, HaveMap):
            assert says == (read.holder == "ef" * 32)
            assert read.pieces.bit_length() <= read.count <= 1 << 20
        assert (read == document) <= (plain(data) == json.loads(document.to_bytes()))


@scaled(80)
def test_pages_of_the_board(cases: int) -> None:
    page = Page(9, (Posted(7, "job/haves", "ef" * 32, b"one"), Posted(9, "job/haves", "ee" * 32, b"two")))
    whole = page_to_bytes(page)

    @fuzz(cases, damaged(whole) | restructured(whole.decode()).map(lambda text: text.encode("utf-8", "replace")))
    def check(data: bytes) -> None:
        with bounded(60 * len(data)):
            try:
                read = page_from_bytes(data)
            except ControlRefused as error:
                return in_one_line(error)
        assert (read == page) <= (plain(data) == json.loads(whole))
        return None


@scaled(300)
def test_control_frames(cases: int) -> None:
    whole = frame(answer(hashlib.sha256(b"x").digest() * 4))

    @fuzz(cases, damaged(whole), st.integers(1, 50))
    def check(data: bytes, step: int) -> None:
        reader = FrameReader()
        with bounded(len(data) + 60_000):
            try:
                for at in range(0, len(data), step):
                    body = reader.take(data[at : at + step][: max(reader.wanted(), 1)])
                    assert reader.wanted() <= MAX_MESSAGE + 1, "it would wait for more than a message may hold"
                    if body is not None:
                        read_answer(body)
                        return
            except ControlRefused as error:
                in_one_line(error)
