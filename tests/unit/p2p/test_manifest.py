from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p.domain import manifest as manifest_module
from p2p.domain.dtypes import BITS, whole_bytes
from p2p.domain.manifest import ALLOWED_FILES, Edge, FileEntry, Manifest, Piece, Tensor
from p2p.errors import ManifestError

A, B, C = "a" * 64, "b" * 64, "c" * 64
GOOD = Manifest(
    job_id="job-1",
    version=7,
    digest=A,
    tensors=(Tensor("a.weight", "BF16", (2, 3), 12), Tensor("b", "F32", (), 4), Tensor("c", "I8", (0, 5), 0)),
    aliases={"head.weight": "a.weight"},
    files=(FileEntry("config.json", (Piece(C, 2),)),),
    canary_ids=(1, 2, 3),
    edges=(Edge("raw", None, None, (Piece(B, 16),)), Edge("planes", None, None, (Piece(C, 13),))),
)


def altered(**changes: object) -> str:
    """The manifest's JSON with top-level keys replaced, canonical again."""
    fields = {**json.loads(GOOD.to_json()), **changes}
    return json.dumps(fields, sort_keys=True, separators=(",", ":"))


def test_round_trip_and_canonical() -> None:
    text = GOOD.to_json()
    assert Manifest.from_json(text) == GOOD
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
    assert (GOOD.nbytes, GOOD.elements) == (16, 7)


def test_the_layout_is_what_tensors_are_called_and_how_they_lie() -> None:
    assert GOOD.layout == replace(GOOD, digest=B, version=9, files=(), edges=()).layout
    assert GOOD.layout != replace(GOOD, aliases={}).layout
    assert GOOD.layout != replace(GOOD, tensors=GOOD.tensors[:2]).layout


def test_pieces_of_an_edge_include_the_files_and_are_distinct() -> None:
    assert GOOD.pieces([GOOD.edges[1]]) == (Piece(C, 2), Piece(C, 13))
    assert GOOD.all_pieces() == {Piece(C, 2), Piece(B, 16), Piece(C, 13)}


def piece(digest: object = B, size: object = 16) -> list[object]:
    return [digest, size]


def edge(**changes: object) -> dict[str, object]:
    return {"encoding": "raw", "base_version": None, "base_digest": None, "pieces": [piece()], "transfer": None, **changes}


HOSTILE = {
    "not JSON": "{",
    "not an object": "[]",
    "deep nesting": "[" * 200_000,
    "duplicate key": altered().replace('"version":7', '"version":7,"version":7'),
    "spaces": json.dumps(json.loads(GOOD.to_json()), sort_keys=True),
    "float version": altered(version=7.0),
    "NaN": altered().replace('"version":7', '"version":NaN'),
    "huge integer": altered().replace('"version":7', '"version":' + "9" * 5000),
    "negative version": altered(version=-1),
    "boolean version": altered(version=True),
    "unknown key": altered(extra=1),
    "many unknown keys": altered(extra=1, more=2),
    "missing key": json.dumps({k: v for k, v in json.loads(GOOD.to_json()).items() if k != "files"}),
    "other format": altered(format="echo2-manifest-9"),
    "job id with a space": altered(job_id="a b"),
    "short digest": altered(digest="ab"),
    "upper-case digest": altered(digest="A" * 64),
    "no tensors": altered(tensors=[]),
    "unsorted tensors": altered(tensors=[["b", "F32", [], 4], ["a", "F32", [], 4]]),
    "repeated tensor": altered(tensors=[["a", "F32", [], 4], ["a", "F32", [], 4]]),
    "unknown dtype": altered(tensors=[["a", "F33", [], 4]]),
    "dtype no text": altered(tensors=[["a", ["F32"], [], 4]]),
    "tensor too short": altered(tensors=[["a", "F32", []]]),
    "negative side": altered(tensors=[["a", "F32", [-1], 4]]),
    "wrong nbytes": altered(tensors=[["a", "F32", [2], 4]]),
    "bits in no whole bytes": altered(tensors=[["a", "F4", [3], 1]]),
    "nine dimensions": altered(tensors=[["a", "U8", [1] * 9, 1]]),
    "too many bytes": altered(tensors=[[f"t{n}", "U8", [2**44], 2**44] for n in range(2)]),
    "control character in a name": altered(tensors=[["a\n", "F32", [], 4]]),
    "alias of nothing": altered(aliases={"x": "nope"}),
    "alias of a list": altered(aliases={"x": []}),
    "alias is stored": altered(aliases={"b": "a.weight"}),
    "aliases no object": altered(aliases=[]),
    "files unsorted": altered(files=[{"name": n, "pieces": []} for n in ("tokenizer.json", "config.json")]),
    "path in a file name": altered(files=[{"name": "../config.json", "pieces": []}]),
    "absolute file name": altered(files=[{"name": "/etc/passwd", "pieces": []}]),
    "code as a file": altered(files=[{"name": "modeling.py", "pieces": []}]),
    "weights as a file": altered(files=[{"name": "model.safetensors", "pieces": []}]),
    "file name no text": altered(files=[{"name": {}, "pieces": []}]),
    "file too large": altered(files=[{"name": "config.json", "pieces": [[format(n, "064x"), 16 << 20] for n in range(5)]}]),
    "canary too long": altered(canary_ids=[0] * 4097),
    "canary negative": altered(canary_ids=[-1]),
    "canary no array": altered(canary_ids=3),
    "edge encoding is a path": altered(edges=[edge(encoding="../x")]),
    "edges alike": altered(edges=[edge(), edge()]),
    "base without digest": altered(edges=[edge(encoding="delta", base_version=3)]),
    "base newer than the version": altered(edges=[edge(encoding="delta", base_version=8, base_digest=B)]),
    "keyframe with a base": altered(edges=[edge(base_version=3, base_digest=B)]),
    "raw of another size": altered(edges=[edge(pieces=[piece(size=17)])]),
    "edge above raw": altered(edges=[edge(encoding="planes", pieces=[piece(size=2 << 20)])]),
    "empty piece": altered(edges=[edge(pieces=[piece(size=0)])]),
    "huge piece": altered(edges=[edge(pieces=[piece(size=2**40)])]),
    "piece no pair": altered(edges=[edge(pieces=[[B]])]),
    "piece with two sizes": altered(edges=[edge(encoding="planes", pieces=[piece(size=1), piece(size=2)])]),
    "piece digest is a path": altered(edges=[edge(pieces=[piece(digest="../../etc/passwd")])]),
    "too many edges": altered(edges=[edge(encoding=f"e{n}") for n in range(65)]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_refused_in_words(name: str) -> None:
    with pytest.raises(ManifestError, match=r"the manifest is refused: .{10}"):
        Manifest.from_json(HOSTILE[name])


def test_the_length_is_limited_before_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_module, "MAX_TEXT", 100)
    with pytest.raises(ManifestError, match="above the limit of 100"):
        Manifest.from_json(GOOD.to_json())


@given(st.text(max_size=60) | st.recursive(st.none() | st.integers() | st.text(max_size=5), st.lists).map(json.dumps))
@settings(deadline=None, max_examples=100)
def test_any_text_is_read_or_refused(text: str) -> None:
    with pytest.raises(ManifestError):
        Manifest.from_json(text)


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_a_changed_manifest_is_refused_or_still_canonical(data: st.DataObject) -> None:
    text = GOOD.to_json()
    at = data.draw(st.integers(0, len(text) - 1))
    changed = text[:at] + data.draw(st.characters(codec="ascii")) + text[at + 1 :]
    try:
        read = Manifest.from_json(changed)
    except ManifestError:
        return
    assert read.to_json() == changed


tensors = st.builds(
    lambda name, dtype, shape: Tensor(name, dtype, shape, whole_bytes(dtype, shape) or 0),
    st.from_regex(r"[a-z.]{1,12}", fullmatch=True),
    st.sampled_from(sorted(BITS)),
    st.lists(st.integers(0, 5).map(lambda side: side * 8), max_size=3).map(tuple).filter(bool),
)


@given(st.lists(tensors, min_size=1, max_size=6, unique_by=lambda t: t.name), st.sets(st.sampled_from(ALLOWED_FILES)))
@settings(deadline=None, max_examples=50)
def test_any_manifest_reads_back(some: list[Tensor], names: set[str]) -> None:
    ordered = tuple(sorted(some, key=lambda t: t.name))
    files = tuple(FileEntry(name, ()) for name in sorted(names))
    manifest = replace(GOOD, tensors=ordered, aliases={}, files=files, edges=(Edge("delta", 1, B, ()),))
    assert Manifest.from_json(manifest.to_json()) == manifest
