from __future__ import annotations

from coordinator.service.transfers import MOST_OPEN, Transfers
from p2p.domain.batches import Batch, text_hash
from p2p.domain.manifest import Piece

A, B, C = "a" * 64, "b" * 64, "c" * 64


def chain(version: int, *rows: str, base: str | None = A, job: str = "j") -> list[str]:
    """Texts of a transfer with one piece a batch."""
    texts: list[str] = []
    for number, digest in enumerate(rows):
        previous = text_hash(texts[-1]) if texts else ""
        batch = Batch(
            job, version, "delta" if base else "planes", base, number, previous, (Piece(digest, 1),), number == len(rows) - 1
        )
        texts.append(batch.to_json())
    return texts


def test_batches_of_two_edges_may_come_by_turns() -> None:
    transfers = Transfers()
    one, two = chain(1, A, B), chain(1, C, B, base=B)
    for text in (one[0], two[0], one[1], two[1]):
        transfers.add(text, "s")
    for texts in (one, two):
        found = transfers.get("j", text_hash(texts[0]))
        assert found is not None
        assert found.documents == [(text, "s") for text in texts]
        assert found.is_complete
    assert transfers.names("j", C)
    assert not transfers.names("other", C)
    assert transfers.get("other", text_hash(one[0])) is None


def test_only_deltas_are_worth_fetching_ahead() -> None:
    transfers = Transfers()
    transfers.add(chain(0, A, base=None)[0], "s")
    assert transfers.deltas("j") == []
    transfers.add(chain(1, B)[0], "s")
    assert [one.first.version for one in transfers.deltas("j")] == [1]
    assert transfers.deltas("other") == []


def test_an_encoder_that_starts_again_starts_the_transfer_again() -> None:
    transfers = Transfers()
    texts = chain(1, A, B, C)
    for text in (texts[0], texts[1], texts[0], texts[1], texts[2]):
        transfers.add(text, "s")
    found = transfers.get("j", text_hash(texts[0]))
    assert found is not None
    assert [text for text, _ in found.documents] == texts


def test_a_batch_without_its_beginning_is_left_out() -> None:
    transfers = Transfers()
    assert transfers.add(chain(1, A, B)[1], "s") == ""
    assert not transfers.names("j", B)


def test_memory_is_bounded_and_closing_forgets_a_job() -> None:
    transfers = Transfers()
    first = [chain(number, A)[0] for number in range(MOST_OPEN + 1)]
    for text in first:
        transfers.add(text, "s")
    assert transfers.get("j", text_hash(first[0])) is None
    transfers.add(chain(1, B, job="k")[0], "s")
    assert transfers.close("j") == [text_hash(text) for text in first[2:]]
    assert transfers.names("k", B)
