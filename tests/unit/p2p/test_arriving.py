"""Reading pieces that are still on their way."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from p2p.adapters.arriving import ArrivingPieces
from p2p.adapters.piece_store import PieceStore
from p2p.codec.pieces import name


def test_a_reader_gets_a_piece_that_comes_while_it_waits(tmp_path: Path) -> None:
    store = PieceStore(tmp_path)
    pieces, read = ArrivingPieces(store), list[bytes]()
    here, late = name(b"here"), name(b"late")
    store.put(here, b"here")
    reader = threading.Thread(target=lambda: read.extend(pieces.read(piece.digest) for piece in (here, late)))
    reader.start()
    store.put(late, b"late")
    reader.join(10)
    assert read == [b"here", b"late"]


def test_what_is_not_here_at_the_end_is_absent(tmp_path: Path) -> None:
    store = PieceStore(tmp_path)
    pieces = ArrivingPieces(store)
    store.put(name(b"here"), b"here")
    pieces.end()
    assert pieces.read(name(b"here").digest) == b"here"
    with pytest.raises(KeyError):
        pieces.read(name(b"never").digest)


def test_what_nobody_wants_any_more_is_absent_here_or_not(tmp_path: Path) -> None:
    """A fetch that was given up: what lies in the store already is not decoded for nothing."""
    store = PieceStore(tmp_path)
    pieces = ArrivingPieces(store)
    store.put(name(b"here"), b"here")
    pieces.abandon()
    with pytest.raises(KeyError):
        pieces.read(name(b"here").digest)


def test_the_end_wakes_a_reader_that_waits(tmp_path: Path) -> None:
    pieces = ArrivingPieces(PieceStore(tmp_path))
    seen: list[str] = []

    def read() -> None:
        try:
            pieces.read(name(b"never").digest)
        except KeyError:
            seen.append("absent")

    reader = threading.Thread(target=read)
    reader.start()
    pieces.end()
    reader.join(10)
    assert seen == ["absent"]
