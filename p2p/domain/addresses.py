"""Where peers live, and which of those places may be dialled.

An address comes from a stranger by way of the coordinator: dialling it must not become a way into the receiver's own network.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network

_EMBEDDING = tuple(
    IPv6Network(text)
    for text in ("::ffff:0:0/96", "::ffff:0:0:0/96", "::/96", "64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32")
)
_RESERVED = tuple(  # that `ipaddress` still calls global: site-local, documentation, SRv6 and 6to4 relays
    ip_network(text) for text in ("fec0::/10", "3fff::/20", "5f00::/16", "192.88.99.0/24")
)


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """Where a peer serves pieces, and the SHA-256 (hex) of its certificate."""

    host: str
    port: int
    certificate_sha256: str


def may_dial(host: str, port: int, allowed_networks: Iterable[str]) -> str | None:
    """None if the address may be dialled, else the reason in words.

    Only address literals, ports from 1024; networks that are not public, or that wrap an IPv4 address, only if listed (CIDR).
    """
    if not 1024 <= port <= 65535:
        return f"port {port} is outside 1024 to 65535"
    address = _literal(host)
    if address is None:
        return f"{host[:60]!r} is not an IP address literal; names are not resolved for peers"
    if any(address in ip_network(network, strict=False) for network in allowed_networks):
        return None
    is_itself = address.is_loopback or address.is_unspecified  # both lie in ::/96
    if isinstance(address, IPv6Address) and not is_itself and any(address in network for network in _EMBEDDING):
        return f"{host} wraps another address; the operator must list its network to allow it"
    if address.is_multicast or not address.is_global or any(address in network for network in _RESERVED):
        return f"{host} is not a public address; the operator must list its network to allow it"
    return None


def spelled(host: str, port: int) -> str:
    """The place as people write it: an IPv6 literal in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _literal(host: str) -> IPv4Address | IPv6Address | None:
    """The address that `host` spells; None for names and for scoped addresses."""
    if "%" in host:
        return None
    try:
        return ip_address(host)
    except ValueError:
        return None
