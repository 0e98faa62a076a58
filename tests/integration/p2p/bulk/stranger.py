"""A peer written from PROTOCOL.md that does what it is told, over a blocking TLS socket."""

from __future__ import annotations

import hashlib
import socket
import ssl
import struct
from types import TracebackType

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2p.domain.addresses import PeerInfo
from tests.integration.p2p.bulk.nodes import key_of, ticket

CHALLENGE, HELLO, WELCOME, RENEW, KNOWS, ASK, BATCH, FORGET = range(1, 9)
HAVE, REQUEST, CANCEL, DATA, ABSENT, ABORTED, PING, PONG, BYE = range(9, 18)
HEAD = struct.Struct("<BbHIII")


class Gone(Exception):
    """The connection ended; the message is the BYE's reason."""


class Stranger:
    """Use as a context manager."""

    def __init__(self, address: PeerInfo, *, timeout: float = 10.0) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        raw = socket.create_connection((address.host, address.port), timeout=timeout)
        self.stream = context.wrap_socket(raw)
        self.certificate = hashlib.sha256(self.stream.getpeercert(binary_form=True) or b"").hexdigest()
        self.challenge = b""

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stream.close()

    def say(self, kind: int, payload: bytes = b"", *, flag: int = 0, transfer: int = 0, a: int = 0, b: int = 0) -> None:
        try:
            self.stream.sendall(HEAD.pack(kind, flag, transfer, len(payload), a, b) + payload)
        except OSError as error:
            raise Gone(str(error)) from error

    def hear(self, *kinds: int) -> tuple[int, int, int, int, bytes]:
        """(kind, transfer, a, b, payload) of the next frame of one of these kinds; others are passed over. Raises Gone."""
        while True:
            kind, _, transfer, length, a, b = HEAD.unpack(self._exactly(HEAD.size))
            payload = self._exactly(length)
            if kind in kinds:
                return kind, transfer, a, b, payload
            if kind == BYE:
                raise Gone(payload.decode())

    def hello(
        self, peer: str, server: str, *, text: str | None = None, key: Ed25519PrivateKey | None = None, proof: str | None = None
    ) -> str:
        """Show a ticket; the proof that was shown. Raises Gone if it is refused."""
        text = text or ticket(peer, server)
        *_, self.challenge = self.hear(CHALLENGE)
        message = b"echo2-bulk\n" + f"{self.challenge.hex()}\n{self.certificate}\nt".encode()
        proof = proof or (key or key_of(peer)).sign(message).hex()
        self.say(HELLO, f'{{"proof":"{proof}","ticket":"{text}"}}'.encode(), a=1)
        self.hear(WELCOME)
        return proof

    def reason(self) -> str:
        """Why the connection ends."""
        try:
            while True:
                self.hear(BYE + 100)
        except Gone as gone:
            return str(gone)

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            try:
                more = self.stream.recv(count - len(data))
            except OSError as error:
                raise Gone(f"silent: {error}") from error
            if not more:
                raise Gone("closed without a word")
            data += more
        return data
