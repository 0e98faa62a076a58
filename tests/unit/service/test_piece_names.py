"""What is remembered of the names of pieces, and how much memory that may take."""

from __future__ import annotations

import pytest
from blake3 import blake3

from coordinator.service.piece_names import PieceNames, name_of
from p2p.domain.hops import Hop
from p2p.domain.manifest import Edge, Piece


def text(number: int, pieces: int) -> tuple[str, set[bytes]]:
    """A hop of so many pieces, and their names."""
    names = [blake3(f"{number} {place}".encode()).digest() for place in range(pieces)]
    edge = Edge("planes", None, None, tuple(Piece(name.hex(), 1) for name in names))
    return Hop("job", number, f"{number:064x}", "a" * 64, edge).to_json(), set(names)


def test_names_are_kept_up_to_a_bound_and_the_oldest_texts_go_first() -> None:
    known = PieceNames[int](most=10)
    for number in range(8):
        document, names = text(number, 4)
        assert known.of(number, document) == names
        assert sum(len(held) for _, held in known.items()) == known.count <= 10
    assert [key for key, _ in known.items()] == [6, 7]


def test_a_text_above_the_bound_is_kept_alone() -> None:
    known = PieceNames[int](most=10)
    for number, pieces in enumerate((4, 30, 4)):
        document, names = text(number, pieces)
        assert known.of(number, document) == names
        assert known.of(number, "never parsed twice") == names
    assert [len(held) for _, held in known.items()] == [4]


@pytest.mark.parametrize("digest", ["AB" * 32, "ab " * 32, "x", "a", ""])
def test_other_spellings_are_no_names(digest: str) -> None:
    assert name_of(digest) == b""
    assert name_of("ab" * 32) == bytes([0xAB] * 32)
