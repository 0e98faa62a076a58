"""The coordinator's node of the libp2p control network: made from settings, started beside the serving, watched."""

from __future__ import annotations

import asyncio

import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.service.control_use import ControlUse
from coordinator.wire.messages import ControlPlace
from p2p.adapters.control import stack
from p2p.adapters.control.net import ControlConfig, ControlNet
from p2p.errors import ControlError

log = structlog.get_logger()
LOOK_S = 1.0
CONNECTIONS = 512


def control_net(key: Ed25519PrivateKey, listen: tuple[str, int], *, networks: tuple[str, ...]) -> ControlNet | None:
    """A node that was not started; None where libp2p is not installed."""
    if stack.version() is None:
        log.info("no_libp2p", then="control messages go over HTTPS")
        return None
    config = ControlConfig(
        key.private_bytes_raw(), listen, is_relay=True, allowed_networks=networks, connections=CONNECTIONS, connections_per_ip=64
    )
    return ControlNet(config)


async def keep_control(net: ControlNet, use: ControlUse, told_host: str) -> None:
    """Start the node, and note where it is to be found as long as it lives; it starts again by itself when its thread dies."""
    try:
        await net.start()
    except ControlError as error:
        log.warning("libp2p_does_not_start", reason=str(error), then="control messages go over HTTPS")
    while True:
        place = _place(net, told_host)
        if place != use.place:
            log.info(
                "control_listens" if place else "control_is_down", place=None if place is None else f"{place.host}:{place.port}"
            )
            use.place = place
        await asyncio.sleep(LOOK_S)


def _place(net: ControlNet, told_host: str) -> ControlPlace | None:
    if not net.is_alive or not net.addresses:
        return None
    return ControlPlace(host=told_host, port=net.addresses[0][1])
