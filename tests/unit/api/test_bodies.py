"""Limits that hold before parsing, and what decoding refuses."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.api.rest_body import check_depth, check_values, decode_json
from coordinator.service.operator_errors import Kind, RequestRefused
from coordinator.wire.rest import NewInvite, NewToken

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def depth_of(value):
    if isinstance(value, dict):
        return 1 + max((depth_of(inner) for inner in value.values()), default=0)
    if isinstance(value, list):
        return 1 + max((depth_of(inner) for inner in value), default=0)
    return 0


@settings(deadline=None, max_examples=200)
@given(JSON, st.booleans())
def test_the_depth_is_that_of_the_document(value, ascii_only):
    data = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    depth = depth_of(value)
    check_depth(data, depth)
    if depth:
        with pytest.raises(RequestRefused, match="deeper"):
            check_depth(data, depth - 1)


def refusal(data, kind):
    try:
        decode_json(data, kind, depth=8)
    except RequestRefused as refused:
        return refused
    return None


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
def test_any_bytes_are_decoded_or_refused(data):
    for kind in (NewToken, NewInvite):
        refused = refusal(data, kind)
        assert refused is None or refused.kind in (Kind.MALFORMED, Kind.INVALID)
        assert refused is None or (refused.field and refused.fix)


@pytest.mark.parametrize(
    ("value", "field"),
    [({"a": [1.0, float("inf")]}, "a.1"), ({"a": {"b": "x\x00"}}, "a.b"), ({"x\x00": 1}, "body"), (float("nan"), "body")],
)
def test_values_that_no_field_can_hold(value, field):
    with pytest.raises(RequestRefused) as refused:
        check_values(value)
    assert refused.value.field == field


def test_types_are_not_guessed():
    with pytest.raises(RequestRefused) as refused:
        decode_json(b'{"max_uses": "2"}', NewInvite, depth=8)
    assert refused.value.field == "max_uses"
    assert decode_json(b'{"expires_in_s": 60, "jobs": ["j-1"]}', NewInvite, depth=8).jobs == ("j-1",)
