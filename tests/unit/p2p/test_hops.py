from __future__ import annotations

import json
from dataclasses import replace

import pytest

from p2p.domain.hops import Hop, hops_of, pieces_named
from p2p.domain.manifest import Edge, Piece
from p2p.domain.signing import check_hop, sign_hop
from p2p.errors import ManifestError
from tests.unit.p2p.test_batches import KEY, PUBLIC
from tests.unit.p2p.test_manifest import GOOD, A, B, C

HOP = Hop("job-1", 6, B, GOOD.layout, Edge("delta", 5, C, (Piece(A, 3), Piece(B, 4)), A))


def altered(**changes: object) -> str:
    return json.dumps({**json.loads(HOP.to_json()), **changes}, sort_keys=True, separators=(",", ":"))


def test_round_trip() -> None:
    assert Hop.from_json(HOP.to_json()) == HOP


def test_the_way_names_both_ends_and_the_price() -> None:
    way = HOP.way
    assert (way.digest, way.version, way.base_digest, way.base_version, way.nbytes) == (B, 6, C, 5, 7)
    assert way.id != replace(HOP, digest=A).way.id
    assert way.id == replace(HOP, version=9).way.id


def test_hops_of_a_manifest() -> None:
    assert [hop.edge for hop in hops_of(GOOD)] == list(GOOD.edges)
    assert {hop.digest for hop in hops_of(GOOD)} == {GOOD.digest}
    for hop in hops_of(GOOD):
        hop.check_fits(GOOD)


def test_pieces_named_by_either_document() -> None:
    assert set(pieces_named(HOP.to_json())) == {Piece(A, 3), Piece(B, 4)}
    assert set(pieces_named(GOOD.to_json())) == GOOD.all_pieces()


def test_signatures() -> None:
    check_hop(PUBLIC, HOP.to_json(), sign_hop(KEY, HOP.to_json()))
    with pytest.raises(ManifestError, match="hop's signature"):
        check_hop(PUBLIC, HOP.to_json(), "00" * 64)


@pytest.mark.parametrize(
    ("hop", "words"),
    [
        (replace(HOP, job_id="other"), "another job or layout"),
        (replace(HOP, layout=A), "another job or layout"),
        (replace(HOP, version=8), "leads beyond version 7"),
        (replace(HOP, edge=replace(HOP.edge, pieces=(Piece(A, (1 << 20) + 17),))), "more than tensors of 16"),
    ],
)
def test_a_hop_that_does_not_fit_is_refused(hop: Hop, words: str) -> None:
    HOP.check_fits(GOOD)
    with pytest.raises(ManifestError, match=words):
        hop.check_fits(GOOD)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        json.dumps(json.loads(HOP.to_json())),
        altered(format="echo2-hop-9"),
        altered(digest="../../etc/passwd"),
        altered(layout=None),
        altered(version=-1),
        altered(edge={}),
        altered(extra=1),
    ],
)
def test_hostile_hops_are_refused(text: str) -> None:
    with pytest.raises(ManifestError):
        Hop.from_json(text)
