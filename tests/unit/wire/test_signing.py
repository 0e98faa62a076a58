"""Signatures of the worker protocol: what they cover, and which headers are read at all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from coordinator.wire import signing
from coordinator.wire.signing import HEADERS, SignedFields

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = signing.public_hex(KEY)
FIELDS = SignedFields("post", "/worker/v1/lease?x=1", "c" * 20, signing.worker_id(PUBLIC), 3, "1764440000.125", "5b" * 16)


def test_the_signed_text_is_the_nine_lines_of_the_specification() -> None:
    lines = FIELDS.message(b"body").decode().split("\n")
    assert lines == [
        "echo2-worker-v1",
        "POST",
        "/worker/v1/lease?x=1",
        "c" * 20,
        signing.worker_id(PUBLIC),
        "3",
        "1764440000.125",
        "5b" * 16,
        blake3(b"body").hexdigest(),
    ]


def test_ids_come_from_the_key() -> None:
    assert signing.key_id(PUBLIC) == blake3(bytes.fromhex(PUBLIC)).hexdigest()[:20]
    assert signing.worker_id(PUBLIC) == "w-" + signing.key_id(PUBLIC)


def test_headers_are_read_back_as_they_were_signed() -> None:
    headers = signing.sign_request(KEY, FIELDS, b"body")
    read = signing.read_headers(headers, method="post", path=FIELDS.path, coordinator=FIELDS.coordinator)
    assert read is not None
    fields, signature = read
    assert fields == FIELDS
    assert signing.verify(PUBLIC, signature, fields.message(b"body"))


@pytest.mark.parametrize(
    "changed",
    [
        replace(FIELDS, method="get"),
        replace(FIELDS, path="/worker/v1/lease"),
        replace(FIELDS, coordinator="d" * 20),
        replace(FIELDS, worker="w-" + "0" * 20),
        replace(FIELDS, epoch=4),
        replace(FIELDS, time="1764440000.126"),
        replace(FIELDS, nonce="5c" * 16),
    ],
)
def test_every_field_is_covered(changed: SignedFields) -> None:
    signature = signing.sign_request(KEY, FIELDS, b"body")["Echo2-Signature"]
    assert not signing.verify(PUBLIC, signature, changed.message(b"body"))
    assert not signing.verify(PUBLIC, signature, FIELDS.message(b"other"))


@given(place=st.sampled_from(range(len(HEADERS))), value=st.text(max_size=40))
def test_a_header_of_another_form_is_not_read(place: int, value: str) -> None:
    headers = signing.sign_request(KEY, FIELDS, b"")
    before = headers[HEADERS[place]]
    headers[HEADERS[place]] = value
    read = signing.read_headers(headers, method="POST", path="/", coordinator="c" * 20)
    if read is not None:  # whatever is read is the exact spelling that the signature covers
        fields, signature = read
        spelled = (fields.worker, str(fields.epoch), fields.time, fields.nonce, signature)
        assert spelled[place] == value
    assert signing.read_headers({**headers, HEADERS[place]: before}, method="POST", path="/", coordinator="c" * 20) is not None


@pytest.mark.parametrize("value", ["nan", "inf", "1e9", "1764440000", "1764440000.1250", "-1.000", " 1.000", "١.000"])
def test_times_of_another_spelling_are_refused(value: str) -> None:
    headers = signing.sign_request(KEY, FIELDS, b"") | {"Echo2-Time": value}
    assert signing.read_headers(headers, method="POST", path="/", coordinator="c" * 20) is None


def test_a_missing_header_is_refused() -> None:
    headers = signing.sign_request(KEY, FIELDS, b"")
    for name in HEADERS:
        assert signing.read_headers({k: v for k, v in headers.items() if k != name}, method="", path="", coordinator="") is None


@pytest.mark.parametrize(("key", "signature"), [("zz", "00"), (PUBLIC, "zz"), (PUBLIC, "00" * 64), ("00" * 32, "00" * 64)])
def test_what_is_no_key_or_signature_does_not_verify(key: str, signature: str) -> None:
    assert not signing.verify(key, signature, b"x")


@pytest.mark.parametrize("key", ["00" * 32, "01" + "00" * 31, "ec" + "ff" * 30 + "7f", "00" * 31 + "80", "00" * 31])
def test_keys_that_anybody_can_sign_for_are_weak(key: str) -> None:
    assert signing.is_weak(key)
    assert not signing.is_weak(PUBLIC)


def test_replies_certificates_and_receipts_have_texts_of_their_own() -> None:
    assert signing.reply_message("5b" * 16, b"{}") == b"echo2-reply\n" + b"5b" * 16 + b"\n" + blake3(b"{}").hexdigest().encode()
    assert signing.certificate_message("ab") == b"echo2-certificate\nab"
    assert signing.receipt_message("w-1", "g/f1", 2, (3, 1)) == b"echo2-receipt\nw-1\ng/f1\n2\n1,3"
