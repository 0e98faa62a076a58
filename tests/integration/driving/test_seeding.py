"""Which transfers the seeder offers, from rows: after a restart, when edges retire, when an encoding breaks off."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3

from coordinator.adapters.seeder_process import SeederProcess, SeederSettings
from coordinator.domain.model import EdgeRow, JobState, Publication, PublicationState
from coordinator.service.deps import Deps
from coordinator.service.seeding import ABANDONED_S, REREAD_S, Documents, seed
from coordinator.service.worker_presence import FETCH_PATIENCE_S
from coordinator.wire.signing import public_hex
from p2p.domain.batches import Batch, Chain, text_hash
from p2p.domain.batching import edge_batches
from p2p.domain.hops import Hop
from p2p.domain.manifest import Edge, Piece
from p2p.domain.signing import sign_batch
from tests.integration.driving.counting import CountingStore
from tests.integration.driving.test_replaced_versions import running


class MovedClock:
    """Stands still until a test moves it."""

    def __init__(self, at: float) -> None:
        self.at = at

    def now(self) -> float:
        return self.at


@pytest.fixture
def deps(deps: Deps) -> Deps:
    return replace(deps, clock=MovedClock(deps.clock.now()))


def digest_of(version: int) -> str:
    return f"{version:064x}"


def piece(name: str) -> Piece:
    return Piece(blake3(name.encode()).hexdigest(), 1000)


def edge_row(version: int, *, base: int | None = None, encoding: str = "delta", transfer: str | None = "") -> EdgeRow:
    """An edge of 100 pieces: a batch of one, one of 64, and a last one. `transfer`: empty for the true one."""
    base_digest = None if base is None else digest_of(base)
    row = tuple(piece(f"{encoding} {base} {version} {number}") for number in range(100))
    edge = Edge(encoding, base, base_digest, row, None)
    true = text_hash(edge_batches("j1", version, edge)[0].to_json())
    hop = Hop("j1", version, digest_of(version), "e" * 64, replace(edge, transfer=true if transfer == "" else transfer))
    way = hop.way
    return EdgeRow("j1", way.id, way.digest, version, encoding, base, base_digest, edge.size, hop.to_json(), "ab" * 64)


def publication(version: int, state: PublicationState = PublicationState.PUBLISHED) -> Publication:
    return Publication("j1", version, digest_of(version), state, "", "", "", (), float(version))


def transfer(row: EdgeRow) -> str:
    return str(Hop.from_json(row.document).edge.transfer)


def texts(row: EdgeRow) -> list[str]:
    hop = Hop.from_json(row.document)
    return [batch.to_json() for batch in edge_batches(hop.job_id, hop.version, hop.edge)]


def seeder_of(deps: Deps, tmp_path: Path) -> SeederProcess:
    """Not started: what it was told is what counts here."""
    return SeederProcess(SeederSettings(tmp_path / "pieces", tmp_path / "key", public_hex(deps.key), "127.0.0.1"))


async def put(deps: Deps, *rows: object) -> None:
    await deps.store.write(lambda tx: tx.put(*rows))


async def test_the_edges_of_the_newest_versions_are_offered_and_again_after_a_restart(deps: Deps, tmp_path: Path) -> None:
    """Under the transfers that their edges name, as batches that anybody accepts; `raw` is for HTTPS only."""
    await running(deps)
    keyframe, raw = edge_row(0, encoding="planes"), edge_row(0, encoding="raw")
    deltas = [edge_row(number, base=number - 1) for number in (1, 2, 3)]
    await put(deps, keyframe, raw, *deltas, *(publication(number) for number in range(4)))
    for _ in range(2):
        seeder = seeder_of(deps, tmp_path)
        await seed(deps, seeder, Documents())
        assert seeder.seeded() == {transfer(deltas[1]): True, transfer(deltas[2]): True}
        for told in seeder._told.values():
            chain = Chain(text_hash(told.texts[0][0]), public_hex(deps.key))
            for text, signature in told.texts:
                chain.accept(text, signature)
            assert chain.is_complete


async def test_what_a_worker_was_told_to_fetch_is_offered_while_it_fetches(deps: Deps, tmp_path: Path) -> None:
    await running(deps)
    keyframe, *deltas = edge_row(0, encoding="planes"), *(edge_row(number, base=number - 1) for number in (1, 2, 3))
    await put(deps, keyframe, *deltas, *(publication(number) for number in range(4)))
    seeder, documents = seeder_of(deps, tmp_path), Documents()
    deps.presence.fetches("w", "j1", 3, at=deps.clock.now(), edges=frozenset({keyframe.id, *(row.id for row in deltas)}))
    await seed(deps, seeder, documents)
    assert set(seeder.seeded()) == {transfer(row) for row in (keyframe, *deltas)}
    deps.clock.at += FETCH_PATIENCE_S + 1
    await seed(deps, seeder, documents)
    assert set(seeder.seeded()) == {transfer(row) for row in deltas[1:]}, "it has it, or is gone"


async def test_edges_that_retire_are_retired(deps: Deps, tmp_path: Path) -> None:
    """A newer version is out: at once. The row itself is gone: a little later, for a row may be on its way."""
    job = await running(deps)
    rows = [edge_row(number, base=number - 1) for number in (1, 2, 3)]
    await put(deps, *rows[:2], publication(1), publication(2))
    seeder, documents = seeder_of(deps, tmp_path), Documents()
    await seed(deps, seeder, documents)
    assert set(seeder.seeded()) == {transfer(row) for row in rows[:2]}
    await put(deps, rows[2], publication(3))
    await seed(deps, seeder, documents)
    assert set(seeder.seeded()) == {transfer(row) for row in rows[1:]}
    await deps.store.write(lambda tx: tx.delete(EdgeRow, job_id="j1", id=rows[1].id))
    await seed(deps, seeder, documents)
    assert transfer(rows[1]) in seeder.seeded()
    deps.clock.at += ABANDONED_S
    await seed(deps, seeder, documents)
    assert set(seeder.seeded()) == {transfer(rows[2])}
    await put(deps, replace(job, state=JobState.COMPLETED))
    await seed(deps, seeder, documents)
    deps.clock.at += ABANDONED_S
    await seed(deps, seeder, documents)
    assert seeder.seeded() == {}, "the job is over"


async def test_an_encoding_that_goes_on_is_offered_and_one_that_was_given_up_is_not(deps: Deps, tmp_path: Path) -> None:
    await running(deps)
    row = edge_row(1, base=0)
    seeder, documents = seeder_of(deps, tmp_path), Documents()
    for text in texts(row)[:2]:
        signature = sign_batch(deps.key, text)
        seeder.batch(text, signature)
        deps.transfers.add(text, signature)
    for _ in range(3):
        await seed(deps, seeder, documents)
        deps.clock.at += ABANDONED_S
    assert seeder.seeded() == {transfer(row): False}, "a large model takes its time"
    deps.transfers.close("j1")
    await seed(deps, seeder, documents)
    deps.clock.at += ABANDONED_S
    await seed(deps, seeder, documents)
    assert seeder.seeded() == {}


async def test_what_is_missing_of_a_published_transfer_is_told(deps: Deps, tmp_path: Path) -> None:
    await running(deps)
    row = edge_row(1, base=0)
    seeder = seeder_of(deps, tmp_path)
    seeder.batch(texts(row)[0], sign_batch(deps.key, texts(row)[0]))
    await put(deps, row, publication(1))
    await seed(deps, seeder, Documents())
    assert seeder.seeded() == {transfer(row): True}
    assert [text for text, _ in seeder._told[transfer(row)].texts] == texts(row)


async def test_an_edge_that_comes_out_as_another_transfer_is_left_to_https(deps: Deps, tmp_path: Path) -> None:
    await running(deps)
    await put(deps, edge_row(1, base=0, transfer="f" * 64), edge_row(1, encoding="planes", transfer=None), publication(1))
    seeder, documents = seeder_of(deps, tmp_path), Documents()
    for _ in range(2):
        await seed(deps, seeder, documents)
        assert seeder.seeded() == {}


async def test_an_encoding_that_begins_again_goes_on_where_it_broke_off(deps: Deps, tmp_path: Path) -> None:
    """The same edge again: its first batches are known, the next ones continue them."""
    told = texts(edge_row(1, base=0))
    seeder = seeder_of(deps, tmp_path)
    for text in (*told[:2], *told):
        seeder.batch(text, "s")
    ((known, is_whole),) = seeder.seeded().items()
    assert (known, is_whole) == (text_hash(told[0]), True)
    assert [text for text, _ in seeder._told[known].texts] == told
    seeder.retire(known)
    assert seeder._places == {}
    seeder.batch(told[1], "s")
    assert seeder.seeded() == {}, "it follows nothing that is known"


async def test_other_batches_under_the_same_transfer_are_not_offered(deps: Deps, tmp_path: Path) -> None:
    """Another version with this number whose first piece is the same: peers that have the one would take the other for a forgery."""
    told = texts(edge_row(1, base=0))
    seeder = seeder_of(deps, tmp_path)
    for text in told[:2]:
        seeder.batch(text, "s")
    second = Batch.from_json(told[1])
    other = replace(second, pieces=second.pieces[:3]).to_json()
    seeder.batch(told[0], "s")
    seeder.batch(other, "s")
    assert seeder.seeded() == {}


async def test_documents_are_read_when_something_changed_and_not_with_every_look(deps: Deps, tmp_path: Path) -> None:
    await running(deps)
    rows = [edge_row(number, base=number - 1) for number in (1, 2, 3)]
    await put(deps, *rows[:2], publication(1), publication(2))
    counting = CountingStore(deps.store)
    counted = replace(deps, store=counting)
    seeder, documents = seeder_of(deps, tmp_path), Documents()
    await seed(counted, seeder, documents)
    assert counting.rows[EdgeRow] == 4, "each once, and once more to tell its batches"
    for _ in range(5):
        await seed(counted, seeder, documents)
    assert (counting.rows[EdgeRow], counting.rows[Publication]) == (4, 2)
    counted.presence.fetches("w", "j1", 2, at=deps.clock.now(), edges=frozenset({rows[0].id}))
    await put(deps, rows[2], publication(3))
    await seed(counted, seeder, documents)
    assert set(seeder.seeded()) == {transfer(row) for row in rows}
    read = counting.rows[EdgeRow]
    documents.forget()
    await seed(counted, seeder, documents)
    assert counting.rows[EdgeRow] == read + 3
    deps.clock.at += REREAD_S
    await seed(counted, seeder, documents)
    assert counting.rows[EdgeRow] == read + 6
