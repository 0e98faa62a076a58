"""Signatures, tickets, proofs, addresses: who may say what, and who may be dialled."""

from __future__ import annotations

import base64
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p.domain.addresses import may_dial, spelled
from p2p.domain.bucket import TokenBucket
from p2p.domain.signing import check_manifest, sign_manifest
from p2p.domain.tickets import Ticket, peek_ticket, read_ticket, sign_ticket
from p2p.errors import ManifestError, TicketError

COORDINATOR = Ed25519PrivateKey.from_private_bytes(b"\x01" * 32)
FETCHER = Ed25519PrivateKey.from_private_bytes(b"\x02" * 32)
OTHER = Ed25519PrivateKey.from_private_bytes(b"\x03" * 32)


def public(key: Ed25519PrivateKey) -> str:
    return key.public_key().public_bytes_raw().hex()


TICKET = Ticket("t-1", "w-a", public(FETCHER), "w-b", "job", 1000)
TEXT = sign_ticket(COORDINATOR, TICKET)


def test_a_manifest_is_signed_as_text_under_its_prefix() -> None:
    signature = sign_manifest(COORDINATOR, "{}")
    check_manifest(public(COORDINATOR), "{}", signature)
    COORDINATOR.public_key().verify(bytes.fromhex(signature), b"echo2-manifest\n{}")


@pytest.mark.parametrize(
    ("key", "text", "signature"),
    [
        (public(OTHER), "{}", sign_manifest(COORDINATOR, "{}")),
        (public(COORDINATOR), "{} ", sign_manifest(COORDINATOR, "{}")),
        (public(COORDINATOR), "{}", "00" * 64),
        (public(COORDINATOR), "{}", "zz"),
        ("not hex", "{}", sign_manifest(COORDINATOR, "{}")),
        (public(COORDINATOR), "{}", COORDINATOR.sign(b"{}").hex()),
    ],
)
def test_other_manifest_signatures_are_refused(key: str, text: str, signature: str) -> None:
    with pytest.raises(ManifestError, match="signature"):
        check_manifest(key, text, signature)


def test_a_ticket_reads_back() -> None:
    assert read_ticket(TEXT, public_key=public(COORDINATOR), server="w-b", now=999.9) == TICKET
    assert peek_ticket(TEXT) == TICKET


@pytest.mark.parametrize(
    ("text", "server", "now", "words"),
    [
        (TEXT, "w-c", 0, "for peer w-b, this is w-c"),
        (TEXT, "w-b", 1000, "expired 0 s ago"),
        (sign_ticket(OTHER, TICKET), "w-b", 0, "not signed"),
        (TEXT[:-2] + "00", "w-b", 0, "not signed"),
        (TEXT.split(".")[0], "w-b", 0, "not signed"),
        ("", "w-b", 0, "not signed"),
        ("é.00", "w-b", 0, "base64url"),
        ("x" * 5000, "w-b", 0, "at most 4096"),
    ],
)
def test_other_tickets_are_refused(text: str, server: str, now: float, words: str) -> None:
    with pytest.raises(TicketError, match=words):
        read_ticket(text, public_key=public(COORDINATOR), server=server, now=now)


@pytest.mark.parametrize("body", [b"[]", b"\xff", b'{"id":1}', TEXT.encode()])
def test_a_signed_body_that_is_no_ticket_is_refused(body: bytes) -> None:
    signature = COORDINATOR.sign(b"echo2-ticket\n" + body).hex()
    text = f"{base64.urlsafe_b64encode(body).decode()}.{signature}"
    with pytest.raises(TicketError, match="refused"):
        read_ticket(text, public_key=public(COORDINATOR), server="w-b", now=0)


@pytest.mark.parametrize("changes", [{"id": "a b"}, {"fetcher_key": "00"}, {"job_id": "../x"}, {"expires_at": -1}])
def test_fields_of_a_ticket_are_checked_even_if_signed(changes: dict[str, object]) -> None:
    text = sign_ticket(COORDINATOR, replace(TICKET, **changes))
    with pytest.raises(TicketError, match="refused"):
        read_ticket(text, public_key=public(COORDINATOR), server="w-b", now=0)


@pytest.mark.parametrize("host", ["8.8.8.8", "2606:4700:4700::1111"])
def test_public_literals_may_be_dialled(host: str) -> None:
    assert may_dial(host, 4001, []) is None


REFUSED = [
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1", "239.1.1.1",
    "255.255.255.255", "240.0.0.1", "192.0.2.1", "198.18.0.1", "::1", "::", "fe80::1", "fc00::1", "ff02::1", "::ffff:8.8.8.8",
    "::ffff:10.0.0.1", "64:ff9b::808:808", "2002:a00:1::", "2001:0:1::", "2001:db8::1",
    "fec0::1", "::ffff:0:127.0.0.1", "3fff::1", "5f00::1", "192.88.99.1",
    "localhost", "example.org", "8.8.8.8.", "8.8.8", "0x08080808", "134744072", "010.8.8.8", "", "2606:4700::1%eth0", "[2606:4700::1]", "8.8.8.8:80",
]  # fmt: skip


@pytest.mark.parametrize("host", REFUSED)
def test_other_addresses_are_refused_with_a_reason(host: str) -> None:
    reason = may_dial(host, 4001, [])
    assert reason is not None
    assert len(reason) > 20


@pytest.mark.parametrize("port", [-1, 0, 22, 1023, 65536])
def test_ports_of_system_services_are_refused(port: int) -> None:
    assert "port" in (may_dial("8.8.8.8", port, ["0.0.0.0/0"]) or "")


def test_listed_networks_may_be_dialled() -> None:
    assert may_dial("127.0.0.1", 1024, ["127.0.0.0/8"]) is None
    assert may_dial("10.1.2.3", 65535, ["::/0", "10.0.0.0/8"]) is None
    assert may_dial("fc00::7", 5000, ["fc00::/7"]) is None
    assert may_dial("::ffff:10.0.0.1", 5000, ["10.0.0.0/8"]) is not None
    assert may_dial("10.1.2.3", 5000, ["192.168.0.0/16"]) is not None


@given(st.ip_addresses())
@settings(deadline=None, max_examples=200)
def test_no_address_outside_the_public_internet_passes(address: object) -> None:
    if may_dial(str(address), 2000, []) is None:
        assert address.is_global  # type: ignore[attr-defined]
        assert not address.is_multicast
        assert not address.is_private
        assert not address.is_loopback


def test_a_bucket_lets_the_burst_through_and_then_keeps_the_rate() -> None:
    bucket = TokenBucket(100, 50, now=0)
    assert bucket.take(50, 0) == 0
    assert bucket.take(100, 0) == pytest.approx(1.0)
    assert bucket.take(100, 1.0) == pytest.approx(1.0)
    assert bucket.take(50, 100.0) == 0  # never more than the burst is saved up
    assert bucket.take(10, 99.0) == pytest.approx(0.1)  # a clock that goes back gives nothing


def test_places_are_spelled_as_people_write_them() -> None:
    """RFC 3986, 3.2.2: an IPv6 literal stands in brackets."""
    assert spelled("192.0.2.1", 7700) == "192.0.2.1:7700"
    assert spelled("2001:db8::1", 7700) == "[2001:db8::1]:7700"
