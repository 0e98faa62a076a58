"""One rule for batches: whatever the row, its batches are a chain that gives the row back, and the same row is the same transfer."""

from __future__ import annotations

from collections.abc import Iterator

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p.domain.batches import Chain, text_hash
from p2p.domain.batching import BATCH_BYTES, MOST_IN_BATCH, batches, edge_batches
from p2p.domain.manifest import Edge, Piece
from p2p.domain.signing import sign_batch

KEY = Ed25519PrivateKey.from_private_bytes(b"\x01" * 32)
PUBLIC = KEY.public_key().public_bytes_raw().hex()
BASE = "b" * 64


def piece(number: int, size: int) -> Piece:
    return Piece(f"{number:064x}", size)


@given(st.lists(st.integers(1, 2 << 20), max_size=400))
@settings(deadline=None, max_examples=60)
def test_the_batches_of_any_row_are_a_chain_that_gives_the_row_back(sizes: list[int]) -> None:
    row = tuple(piece(number, size) for number, size in enumerate(sizes))
    told = edge_batches("job", 7, Edge("delta", 6, BASE, row))
    chain = Chain(text_hash(told[0].to_json()), PUBLIC)
    for batch in told:
        assert not chain.is_complete
        chain.accept(batch.to_json(), sign_batch(KEY, batch.to_json()))
    assert chain.is_complete
    assert chain.pieces == row
    assert chain.first is not None
    assert chain.first.edge == ("job", 7, "delta", BASE)
    assert all(len(batch.pieces) <= MOST_IN_BATCH for batch in told)
    assert all(sum(one.size for one in batch.pieces[:-1]) < BATCH_BYTES for batch in told)


def test_the_first_piece_is_told_before_the_second_is_made() -> None:
    made: list[int] = []

    def row() -> Iterator[Piece]:
        for number in range(3):
            made.append(number)
            yield piece(number, 10)

    told = batches("job", 1, "planes", None, row())
    assert next(told).pieces == (piece(0, 10),)
    assert made == [0]
    assert [batch.pieces for batch in told] == [(piece(1, 10), piece(2, 10))]


def test_an_empty_row_is_one_empty_last_batch() -> None:
    (only,) = edge_batches("job", 1, Edge("delta", 0, BASE, ()))
    assert (only.number, only.pieces, only.is_last) == (0, (), True)
