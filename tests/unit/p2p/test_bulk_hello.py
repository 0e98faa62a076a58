"""Who may open a bulk connection: the holder of the ticket, on this very connection."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2p.domain.bulk_hello import Hello, check_dialler, prove_dialler
from p2p.domain.tickets import Ticket, sign_ticket
from p2p.errors import FrameRefused, TicketError

COORDINATOR = Ed25519PrivateKey.from_private_bytes(b"\x01" * 32)
DIALLER = Ed25519PrivateKey.from_private_bytes(b"\x02" * 32)
OTHER = Ed25519PrivateKey.from_private_bytes(b"\x03" * 32)
TICKET = Ticket("t-1", "w-a", DIALLER.public_key().public_bytes_raw().hex(), "w-b", "job", 1000)
CHALLENGE, CERTIFICATE = b"c" * 32, "ab" * 32


def test_the_proof_is_a_signature_over_challenge_certificate_and_ticket() -> None:
    proof = prove_dialler(DIALLER, CHALLENGE, CERTIFICATE, TICKET)
    message = b"echo2-bulk\n" + b"63" * 32 + b"\n" + b"ab" * 32 + b"\nt-1"
    DIALLER.public_key().verify(bytes.fromhex(proof), message)
    check_dialler(TICKET, CHALLENGE, CERTIFICATE, proof)


@pytest.mark.parametrize(
    ("ticket", "challenge", "certificate", "signer"),
    [
        (TICKET, b"d" * 32, CERTIFICATE, DIALLER),
        (TICKET, CHALLENGE, "cd" * 32, DIALLER),
        (replace(TICKET, id="t-2"), CHALLENGE, CERTIFICATE, DIALLER),
        (TICKET, CHALLENGE, CERTIFICATE, OTHER),
    ],
    ids=["replayed on another challenge", "passed on by another server", "for another ticket", "stolen"],
)
def test_other_proofs_are_refused(ticket: Ticket, challenge: bytes, certificate: str, signer: Ed25519PrivateKey) -> None:
    proof = prove_dialler(signer, challenge, certificate, ticket)
    with pytest.raises(TicketError, match="not the signature of w-a over this challenge"):
        check_dialler(TICKET, CHALLENGE, CERTIFICATE, proof)


def test_a_key_that_is_none_is_refused() -> None:
    with pytest.raises(TicketError, match="ticket t-1"):
        check_dialler(replace(TICKET, fetcher_key="zz"), CHALLENGE, CERTIFICATE, "00" * 64)


def test_hello_comes_back() -> None:
    hello = Hello(sign_ticket(COORDINATOR, TICKET), "ab" * 64)
    assert Hello.from_bytes(bytearray(hello.to_bytes())) == hello


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"\xff", "ascii"),
        (b"{", "not JSON"),
        (b'{"ticket":"a.b"}', "missing"),
        (b'{"ticket":"a.b","proof":"00"}', "ticket is"),
        (b'{"ticket":"a.' + b"0" * 128 + b'","proof":"00"}', "proof is"),
    ],
)
def test_other_hellos_are_refused(payload: bytes, words: str) -> None:
    with pytest.raises(FrameRefused, match=words):
        Hello.from_bytes(payload)
