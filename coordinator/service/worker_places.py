"""Which jobs a worker may serve, and which addresses other workers may be sent to."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from coordinator.domain.model import Job, Worker

CARRIER_NAT = ip_network("100.64.0.0/10")


def may_serve(job: Job, worker: Worker, invited_to: Sequence[str]) -> tuple[bool, str]:
    """Whether the worker may serve the job, and why not. `invited_to` is empty when its invite names no jobs."""
    wanted = job.config.workers
    if invited_to and job.id not in invited_to and job.name not in invited_to:
        return False, f"your invite does not name job {job.name}"
    kind = worker.engine.get("kind")
    if kind not in wanted.engines:
        return False, f"job {job.name} takes engines {', '.join(wanted.engines)} (workers.engines), yours is {kind}"
    if wanted.names and worker.name not in wanted.names:
        return False, f"job {job.name} takes named workers only (workers.names), and {worker.name} is not among them"
    if wanted.trust != "any" and worker.name not in wanted.names:
        return False, f"job {job.name} asks for trust {wanted.trust!r} (workers.trust), which this worker does not have"
    return True, f"serves job {job.name}"


def is_dialable(host: str, networks: Sequence[str]) -> bool:
    """Whether other workers may be sent to this address literal: public, or inside a network that the operator lists."""
    try:
        address = ip_address(host)
    except ValueError:
        return False
    if isinstance(address, IPv6Address) and (address.ipv4_mapped or address.scope_id):
        return False
    if any(address in ip_network(network) for network in networks):
        return True
    return _is_public(address)


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    if isinstance(address, IPv4Address) and address in CARRIER_NAT:
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved
