"""Self-signed certificates and TLS 1.3 contexts. Trust is by fingerprint: the other side was told which certificate to expect."""

from __future__ import annotations

import hashlib
import os
import ssl
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import aiohttp
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from p2p.adapters.durable import make_directory_durably, write_durably

CERTIFICATE, KEY = "certificate.pem", "certificate.key"
VALID = timedelta(days=825)
RENEW_BEFORE = timedelta(days=30)


def self_signed(directory: Path, names: Sequence[str]) -> tuple[Path, Path, str]:
    """Certificate path, key path (0600) and SHA-256 (hex) of a certificate for `names` (host names or address literals).

    One that lies in `directory`, is for these names and valid for 30 days more is used again. Raises OSError, ValueError (no names).
    """
    if not names:
        raise ValueError("a certificate needs at least one host name or address")
    certificate, key = directory / CERTIFICATE, directory / KEY
    fingerprint = _usable(certificate, key, names)
    return certificate, key, fingerprint or _make(certificate, key, names)


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """TLS 1.3 or nothing, with this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(certificate, key)
    return context


def certificate_sha256(certificate: Path) -> str:
    """SHA-256 (hex) of the first certificate in a PEM file: the one a server presents. Raises OSError, ValueError."""
    return _fingerprint(x509.load_pem_x509_certificates(certificate.read_bytes())[0])


def pinned_client(sha256: str) -> aiohttp.Fingerprint:
    """What to give aiohttp as `ssl` so that only the certificate with this SHA-256 (hex) is accepted. Raises ValueError."""
    return aiohttp.Fingerprint(bytes.fromhex(sha256))


def _usable(certificate: Path, key: Path, names: Sequence[str]) -> str | None:
    """The fingerprint of the certificate on disk, if it and its key will do."""
    try:
        parsed = x509.load_pem_x509_certificate(certificate.read_bytes())
        private = serialization.load_pem_private_key(key.read_bytes(), password=None)
        held = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, TypeError, x509.ExtensionNotFound):
        return None
    fresh = parsed.not_valid_after_utc - datetime.now(UTC) > RENEW_BEFORE
    if not fresh or private.public_key() != parsed.public_key() or set(held) != set(_alternatives(names)):
        return None
    return _fingerprint(parsed)


def _make(certificate: Path, key: Path, names: Sequence[str]) -> str:
    """Write a new pair; the key is never readable by others, not even for a moment."""
    private = ec.generate_private_key(ec.SECP256R1())
    made = _build(private, names)
    pem = private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    make_directory_durably(certificate.parent)
    key.unlink(missing_ok=True)
    descriptor = os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as out:
        out.write(pem)
        out.flush()
        os.fsync(out.fileno())
    write_durably(certificate, made.public_bytes(serialization.Encoding.PEM))
    return _fingerprint(made)


def _build(private: ec.EllipticCurvePrivateKey, names: Sequence[str]) -> x509.Certificate:
    now = datetime.now(UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # for clocks that lag
        .not_valid_after(now + VALID)
        .add_extension(x509.SubjectAlternativeName(_alternatives(names)), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(private, hashes.SHA256())
    )


def _alternatives(names: Sequence[str]) -> list[x509.GeneralName]:
    return [_alternative(name) for name in dict.fromkeys(names)]


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _fingerprint(certificate: x509.Certificate) -> str:
    return hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).hexdigest()
