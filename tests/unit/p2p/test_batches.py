from __future__ import annotations

import json
from dataclasses import replace

import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p.domain.batches import MAX_BATCH_PIECES, MAX_TEXT, Batch, Chain, text_hash
from p2p.domain.manifest import MAX_PIECE_BYTES, Piece
from p2p.domain.signing import check_batch, check_manifest, sign_batch, sign_manifest
from p2p.errors import BatchRefused, ManifestError

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw().hex()
A, B = "a" * 64, "b" * 64


def some_piece(number: int, size: int = 100) -> Piece:
    return Piece(blake3(number.to_bytes(4, "little")).hexdigest(), size)


def chained(row: list[list[Piece]], *, version: int = 7, base: str | None = A) -> list[str]:
    """The texts of a transfer whose batches hold these pieces."""
    texts: list[str] = []
    for number, pieces in enumerate(row):
        previous = text_hash(texts[-1]) if texts else ""
        batch = Batch("job-1", version, "delta", base, number, previous, tuple(pieces), number == len(row) - 1)
        texts.append(batch.to_json())
    return texts


TEXTS = chained([[some_piece(0), some_piece(1)], [some_piece(2)], [some_piece(3), some_piece(4)], []])
TRANSFER = blake3(TEXTS[0].encode()).hexdigest()


def signed(text: str) -> tuple[str, str]:
    return text, sign_batch(KEY, text)


def after(count: int) -> Chain:
    """A chain that accepted so many batches."""
    chain = Chain(TRANSFER, PUBLIC)
    for text in TEXTS[:count]:
        chain.accept(*signed(text))
    return chain


def altered(text: str, **changes: object) -> str:
    return json.dumps({**json.loads(text), **changes}, sort_keys=True, separators=(",", ":"))


def test_batches_in_order_give_the_whole_row() -> None:
    chain = Chain(TRANSFER, PUBLIC)
    assert (chain.first, chain.next_number, chain.is_complete) == (None, 0, False)
    added = [chain.accept(*signed(text)) for text in TEXTS]
    assert [len(pieces) for pieces in added] == [2, 1, 2, 0]
    assert chain.pieces == tuple(some_piece(number) for number in range(5))
    assert chain.first == Batch.from_json(TEXTS[0])
    assert chain.is_complete
    assert chain.documents() == tuple(signed(text) for text in TEXTS)
    assert chain.documents(3) == (signed(TEXTS[3]),)


def test_a_batch_that_was_accepted_may_come_again_and_adds_nothing() -> None:
    chain = after(3)
    assert chain.accept(*signed(TEXTS[0])) == ()
    assert chain.accept(*signed(TEXTS[2])) == ()
    assert (chain.next_number, len(chain.pieces)) == (3, 5)


def test_a_forged_batch_is_refused() -> None:
    other = Ed25519PrivateKey.from_private_bytes(bytes(32))
    with pytest.raises(BatchRefused, match="signature"):
        after(0).accept(TEXTS[0], sign_batch(other, TEXTS[0]))
    with pytest.raises(BatchRefused, match="signature"):
        after(0).accept(TEXTS[0], "no hex")
    with pytest.raises(BatchRefused, match="signature"):
        after(0).accept(TEXTS[0], sign_manifest(KEY, TEXTS[0]))
    with pytest.raises(BatchRefused, match="signature"):
        after(1).accept(altered(TEXTS[1], pieces=[[B, 100]]), sign_batch(KEY, TEXTS[1]))


def test_signatures_of_one_kind_do_not_serve_for_the_other() -> None:
    check_batch(PUBLIC, "x", sign_batch(KEY, "x"))
    check_manifest(PUBLIC, "x", sign_manifest(KEY, "x"))
    with pytest.raises(ManifestError):
        check_manifest(PUBLIC, "x", sign_batch(KEY, "x"))


def test_reordered_batches_are_refused_and_change_nothing() -> None:
    chain = after(1)
    with pytest.raises(BatchRefused, match="number 1 is next"):
        chain.accept(*signed(TEXTS[2]))
    with pytest.raises(BatchRefused, match="number 0 is next"):
        after(0).accept(*signed(TEXTS[1]))
    assert (chain.next_number, len(chain.pieces)) == (1, 2)


def test_a_number_that_comes_again_with_other_content_is_refused() -> None:
    other = altered(TEXTS[1], pieces=[[B, 100]])
    with pytest.raises(BatchRefused, match="came before with other content"):
        after(2).accept(*signed(other))


@pytest.mark.parametrize(
    "foreign",
    [
        pytest.param(chained([[some_piece(9)], [some_piece(2)]], version=7)[1], id="another chain of the edge"),
        pytest.param(altered(TEXTS[1], version=8), id="another version"),
        pytest.param(altered(TEXTS[1], base_digest=B), id="another base"),
        pytest.param(altered(TEXTS[1], base_digest=None), id="no base"),
        pytest.param(altered(TEXTS[1], encoding="planes"), id="another encoding"),
        pytest.param(altered(TEXTS[1], job_id="job-2"), id="another job"),
    ],
)
def test_a_signed_batch_of_another_transfer_is_refused(foreign: str) -> None:
    with pytest.raises(BatchRefused, match="another's"):
        after(1).accept(*signed(foreign))


def test_the_first_batch_must_have_the_hash_that_names_the_transfer() -> None:
    with pytest.raises(BatchRefused, match="not the transfer's"):
        after(0).accept(*signed(altered(TEXTS[0], version=8)))


def test_nothing_follows_the_last_batch() -> None:
    more = Batch("job-1", 7, "delta", A, 4, text_hash(TEXTS[3]), (some_piece(5),), True).to_json()
    with pytest.raises(BatchRefused, match="follows the last one, number 3"):
        after(4).accept(*signed(more))


def test_limits_of_an_edge() -> None:
    chain = Chain(TRANSFER, PUBLIC, most_bytes=250)
    chain.accept(*signed(TEXTS[0]))
    with pytest.raises(BatchRefused, match=r"at most .* of 250"):
        chain.accept(*signed(TEXTS[1]))
    two_sizes = altered(TEXTS[1], pieces=[[some_piece(0).digest, 99]])
    with pytest.raises(BatchRefused, match="two sizes: 100 and 99"):
        after(1).accept(*signed(two_sizes))


def test_an_oversize_text_is_refused_before_anything_is_read() -> None:
    with pytest.raises(BatchRefused, match="characters, above the limit"):
        after(0).accept("[" * (MAX_TEXT + 1), "")
    with pytest.raises(BatchRefused, match="characters, above the limit"):
        Batch.from_json("[" * (MAX_TEXT + 1))


def test_the_fullest_batch_fits_the_limit_of_text() -> None:
    pieces = tuple(replace(some_piece(number), size=MAX_PIECE_BYTES) for number in range(MAX_BATCH_PIECES))
    batch = Batch("j" * 128, 2**53, "e" * 32, A, 2**20, B, pieces, False)
    assert Batch.from_json(batch.to_json()) == batch
    assert len(batch.to_json()) < MAX_TEXT


HOSTILE = {
    "not JSON": "{",
    "not canonical": json.dumps(json.loads(TEXTS[0])),
    "unknown key": altered(TEXTS[0], extra=1),
    "other format": altered(TEXTS[0], format="echo2-batch-9"),
    "path for an encoding": altered(TEXTS[0], encoding="../../etc/passwd"),
    "path for a piece": altered(TEXTS[0], pieces=[["../../../../../../../../../../../../../../../../../../../etc/passwd", 5]]),
    "path for a job": altered(TEXTS[0], job_id="../job"),
    "path for a base": altered(TEXTS[0], base_digest="/etc/passwd"),
    "path for the batch before": altered(TEXTS[1], previous="../batch"),
    "no pieces": altered(TEXTS[0], pieces=[]),
    "too many pieces": altered(TEXTS[0], pieces=[[A, 1]] * (MAX_BATCH_PIECES + 1)),
    "piece too large": altered(TEXTS[0], pieces=[[A, MAX_PIECE_BYTES + 1]]),
    "empty piece": altered(TEXTS[0], pieces=[[A, 0]]),
    "float number": altered(TEXTS[0], number=0.0),
    "negative number": altered(TEXTS[1], number=-1),
    "is_last no bool": altered(TEXTS[0], is_last=1),
    "first with a batch before": altered(TEXTS[0], previous=A),
    "second without a batch before": altered(TEXTS[1], previous=""),
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_batches_are_refused_though_they_are_signed(text: str) -> None:
    with pytest.raises(BatchRefused):
        after(0).accept(*signed(text))


names = st.integers(0, 2**16).map(some_piece)
rows = st.lists(st.lists(names, min_size=1, max_size=5, unique=True), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(row=rows, data=st.data())
def test_any_order_of_arrival_gives_the_row_or_a_refusal_that_changes_nothing(row: list[list[Piece]], data: st.DataObject) -> None:
    texts = chained(row)
    chain = Chain(text_hash(texts[0]), PUBLIC)
    arrivals = data.draw(st.lists(st.integers(0, len(texts) - 1), max_size=12)) + list(range(len(texts)))
    expected = 0
    for number in arrivals:
        if number > expected:
            with pytest.raises(BatchRefused):
                chain.accept(*signed(texts[number]))
        else:
            added = chain.accept(*signed(texts[number]))
            assert added == (tuple(row[number]) if number == expected else ())
            expected += number == expected
        assert chain.pieces == tuple(piece for pieces in row[:expected] for piece in pieces)
    assert chain.is_complete


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=300) | st.binary(max_size=300).map(lambda data: data.decode("latin-1")))
def test_any_signed_text_is_refused_in_words(text: str) -> None:
    with pytest.raises(BatchRefused):
        Batch.from_json(text)
