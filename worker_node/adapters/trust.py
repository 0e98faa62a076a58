"""Who the coordinator is. The invite pins its Ed25519 key; TLS is trusted by the web's roots, or by a statement of that key.

Over a web-trusted certificate, and on loopback, `GET identity` must name the pinned key. Over any other certificate the
statement signed with the key must name exactly the certificate that was served, which is then the only one accepted.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import ssl
from dataclasses import dataclass
from typing import Literal

import aiohttp
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from yarl import URL

from coordinator.wire.messages import PROTOCOL_VERSION, Digest
from coordinator.wire.signing import certificate_message, verify
from worker_node.adapters.replies import FAILURES, in_words
from worker_node.domain.events import Outcome
from worker_node.errors import CallError, TrustError

IDENTITY_PATH = "/worker/v1/identity"
TLS_FAULTS = (aiohttp.ClientConnectorCertificateError, aiohttp.ServerFingerprintMismatch, aiohttp.ClientConnectorSSLError)
_LIMIT_S = 15.0
_MOST_BYTES = 65_536


class Identity(BaseModel):
    """GET identity (unsigned): what the coordinator says about itself; nothing in it counts unless it is proved."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    public_key: Digest
    certificate_sha256: Digest | None = None
    statement: str = Field("", max_length=128)
    protocol_min: int = PROTOCOL_VERSION
    protocol_max: int = PROTOCOL_VERSION
    server_time: float


@dataclass(frozen=True, slots=True)
class Trust:
    """How replies are known to be the coordinator's; `ssl` goes into every request."""

    how: Literal["web roots", "pinned certificate", "loopback", "insecure http"]
    ssl: aiohttp.Fingerprint | bool
    server_time: float


async def establish(session: aiohttp.ClientSession, base: URL, coordinator_key: str, *, insecure_http: bool) -> Trust:
    """Find out whether `base` is the coordinator that holds `coordinator_key`. Raises TrustError, or CallError if nobody answers."""
    if base.scheme == "http":
        return await _over_http(session, base, coordinator_key, insecure_http=insecure_http)
    if base.scheme != "https":
        raise TrustError(f"the coordinator's URL {str(base)!r} must start with https:// (or http:// on loopback)")
    try:
        identity = await _identity(session, base, verified=True)
    except TLS_FAULTS:
        return await _by_statement(session, base, coordinator_key)
    _check(identity, coordinator_key, base)
    return Trust("web roots", ssl=True, server_time=identity.server_time)


def is_loopback(host: str | None) -> bool:
    """Whether a host names this machine for sure."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


async def _over_http(session: aiohttp.ClientSession, base: URL, coordinator_key: str, *, insecure_http: bool) -> Trust:
    loopback = is_loopback(base.host)
    if not loopback and not insecure_http:
        raise TrustError(
            f"plain http to {base.host} would be readable by anyone on the way: use https, or --insecure-http in a lab"
        )
    identity = await _identity(session, base, verified=True)
    _check(identity, coordinator_key, base)
    return Trust("loopback" if loopback else "insecure http", ssl=True, server_time=identity.server_time)


async def _by_statement(session: aiohttp.ClientSession, base: URL, coordinator_key: str) -> Trust:
    served = await served_certificate(base)
    pin = aiohttp.Fingerprint(bytes.fromhex(served))
    try:
        identity = await _identity(session, base, verified=pin)
    except TLS_FAULTS as error:
        words = f"the certificate of {base.host} changed between two connections: {in_words(error)}"
        raise CallError(Outcome.TRY_AGAIN, "tls", words) from error
    _check(identity, coordinator_key, base)
    if identity.certificate_sha256 != served or not verify(coordinator_key, identity.statement, certificate_message(served)):
        raise TrustError(
            f"{base.host} serves certificate {served[:16]}..., which neither the web's roots nor the coordinator's own key vouch for: "
            "somebody may be in between; check the URL with the operator"
        )
    return Trust("pinned certificate", ssl=pin, server_time=identity.server_time)


async def served_certificate(base: URL) -> str:
    """SHA-256 (hex) of the certificate that the host serves now; nothing is sent to it."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the certificate is only looked at; the pinned key decides
    try:
        async with asyncio.timeout(_LIMIT_S):
            _, writer = await asyncio.open_connection(base.host, base.port, ssl=context, server_hostname=base.host)
    except ssl.SSLError as error:
        words = f"{base} does not speak TLS ({error.reason}): if the coordinator serves plain HTTP, write http:// in the URL"
        raise CallError(Outcome.TRY_AGAIN, "unreachable", words) from error
    except (OSError, TimeoutError) as error:
        words = f"{base} cannot be reached: {error or type(error).__name__}; check the URL, and that the coordinator runs"
        raise CallError(Outcome.TRY_AGAIN, "unreachable", words) from error
    certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return hashlib.sha256(certificate).hexdigest()


async def _identity(session: aiohttp.ClientSession, base: URL, *, verified: aiohttp.Fingerprint | bool) -> Identity:
    url = URL(f"{base}{IDENTITY_PATH}", encoded=True)
    try:
        async with asyncio.timeout(_LIMIT_S):
            async with session.get(url, ssl=verified, allow_redirects=False) as response:
                body = await response.content.read(_MOST_BYTES)
                status = response.status
    except TLS_FAULTS:
        raise
    except TimeoutError as error:
        raise CallError(Outcome.TRY_AGAIN, "timeout", f"no answer from {base} within {_LIMIT_S:.0f} s") from error
    except FAILURES as error:
        raise CallError(Outcome.TRY_AGAIN, "unreachable", f"{base} cannot be reached: {in_words(error)}") from error
    try:
        return Identity.model_validate_json(body)
    except (ValidationError, ValueError) as error:
        message = f"{url} answered with status {status} and no coordinator's identity: check the URL"
        raise CallError(Outcome.TRY_AGAIN, "not_a_coordinator", message) from error


def _check(identity: Identity, coordinator_key: str, base: URL) -> None:
    if identity.public_key != coordinator_key:
        raise TrustError(
            f"{base} is coordinator {identity.public_key[:16]}..., the invite is for {coordinator_key[:16]}...: use the URL that "
            "belongs to the invite"
        )
    if not identity.protocol_min <= PROTOCOL_VERSION <= identity.protocol_max:
        raise TrustError(
            f"{base} speaks protocol {identity.protocol_min} to {identity.protocol_max}, this worker speaks {PROTOCOL_VERSION}: "
            "update echo2 on the older side"
        )
