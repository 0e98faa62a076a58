"""The control plane beside HTTPS, as the rest of the service sees it. Lost in a crash, which changes no decision."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from coordinator.wire.messages import ControlPlace


@dataclass(slots=True)
class ControlUse:
    """`place`: where libp2p listens now; None while it does not. `asked`: questions answered since the start, by the way they came."""

    place: ControlPlace | None = None
    asked: Counter[str] = field(default_factory=Counter)
