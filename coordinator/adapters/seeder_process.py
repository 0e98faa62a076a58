"""The seeder as a child process (`p2p.adapters.bulk.seeder`): started, watched, started again, and told everything anew after a restart."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from asyncio.subprocess import PIPE, Process
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.adapters.child import child_environment
from coordinator.wire.messages import PeerAddress
from p2p.adapters.durable import write_durably
from p2p.domain.batches import Batch, text_hash
from p2p.domain.tickets import SEEDER

log = structlog.get_logger()
LINE_LIMIT_BYTES = 16 << 20
RESTART_FIRST_S, RESTART_MOST_S = 0.5, 30.0
HEALTHY_S = 60.0  # a life this long starts the back-off over
SILENCE_S = 30.0  # it reports every few seconds: one that does not hangs, and is started again


@dataclass(frozen=True, slots=True)
class SeederSettings:
    """How the seeder runs. `up` in bytes a second; None: not limited."""

    store: Path
    key_file: Path
    coordinator_public_key: str
    host: str
    port: int = 0
    allowed_networks: tuple[str, ...] = ()
    up: float | None = None
    congestion: str | None = None
    told_host: str | None = ""  # where workers are told to find it; "": host; None: nowhere


@dataclass(slots=True)
class _Told:
    """The batches of one transfer, in order: texts with signatures, and the texts' hashes."""

    texts: list[tuple[str, str]] = field(default_factory=list)
    hashes: list[str] = field(default_factory=list)
    is_whole: bool = False


class SeederProcess:
    """See `coordinator.service.seeding.Seeder`. `run` keeps the process up until it is cancelled."""

    def __init__(self, settings: SeederSettings) -> None:
        self._settings = settings
        self._told: dict[str, _Told] = {}  # by transfer
        self._places: dict[str, str] = {}  # hash of a text that was told -> its transfer
        self._child: Process | None = None
        self._address: PeerAddress | None = None
        self._port = settings.port
        self._lives = 0
        self.state: dict[str, Any] = {}  # the newest report: see `NodeState`
        self.first_sent: dict[str, float] = {}  # transfer -> Unix seconds

    @property
    def address(self) -> PeerAddress | None:
        """Where it listens; None while it does not run."""
        return self._address

    @property
    def uplink(self) -> float:
        """Its measured upload rate, bytes a second; 0 when not known."""
        return float(self.state.get("uplink", 0.0))

    def seeded(self) -> dict[str, bool]:
        """Transfers whose batches were told, and whether the last one was."""
        return {transfer: told.is_whole for transfer, told in self._told.items()}

    def batch(self, text: str, signature: str) -> None:
        """Tell a batch, now and after each restart. One that was told already, or follows none that was, changes nothing.

        An encoding that broke off and begins again tells the same batches again. One that tells others under the same transfer cannot be
        offered at all: peers would take it for a forgery.
        """
        batch, digest = Batch.from_json(text), text_hash(text)
        transfer = digest if batch.number == 0 else self._places.get(batch.previous)
        if transfer is None:
            return
        told = self._told.setdefault(transfer, _Told())
        if batch.number < len(told.hashes):
            if told.hashes[batch.number] != digest:
                log.warning("transfer_retold_otherwise", transfer=transfer[:16], batch=batch.number)
                self.retire(transfer)
            return
        told.texts.append((text, signature))
        told.hashes.append(digest)
        told.is_whole = batch.is_last
        self._places[digest] = transfer
        self._say({"batch": text, "signature": signature})

    def retire(self, transfer: str) -> None:
        """Offer it no more."""
        told = self._told.pop(transfer, None)
        if told is None:
            return
        for digest in told.hashes:
            self._places.pop(digest, None)
        self.first_sent.pop(transfer, None)
        self._say({"retire": transfer})

    async def run(self) -> None:
        """Start the process again whenever it ends. Waits for its output; ends when cancelled."""
        pause_s = RESTART_FIRST_S
        await asyncio.to_thread(_make_key, self._settings.key_file)
        while True:
            begun = time.monotonic()
            try:
                await self._live()
            except (OSError, ValueError) as error:  # no process, or one that is silent or speaks nonsense: workers fetch over HTTPS
                log.warning("seeder_failed", reason=f"{type(error).__name__}: {error}")
            if time.monotonic() - begun > HEALTHY_S:
                pause_s = RESTART_FIRST_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RESTART_MOST_S)

    async def _live(self) -> None:
        """One life of the process."""
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "p2p.adapters.bulk.seeder",
            env=child_environment(),
            stdin=PIPE,
            stdout=PIPE,
            limit=LINE_LIMIT_BYTES,
        )
        self._child = child
        self._lives += 1
        try:
            self._say({"start": self._start()})
            for told in list(self._told.values()):
                for text, signature in told.texts:
                    self._say({"batch": text, "signature": signature})
            assert child.stdout is not None
            while line := await asyncio.wait_for(child.stdout.readline(), SILENCE_S):
                self._hear(json.loads(line))
            log.warning("seeder_ended", code=await child.wait())
        finally:
            if self._address is None:
                self._port = self._settings.port  # the port of an earlier life is taken, perhaps
            self._child, self._address = None, None
            if child.returncode is None:
                child.kill()
                await child.wait()

    def _start(self) -> dict[str, object]:
        """See `p2p.adapters.bulk.seeder.Start`."""
        settings = self._settings
        return {
            "peer_id": SEEDER,
            "coordinator_public_key": settings.coordinator_public_key,
            "store": str(settings.store),
            "key_file": str(settings.key_file),
            "host": settings.host,
            "port": self._port,  # that of an earlier life is asked for again, so that peers find it where it was
            "names": [SEEDER],
            "allowed_networks": list(settings.allowed_networks),
            "up": settings.up,
            "congestion": settings.congestion,
            "returns": self._lives > 1,
        } | ({"uplink": self.uplink} if self.uplink else {})

    def _say(self, command: dict[str, object]) -> None:
        """A line to the process, if it runs: what it missed is told when it starts.

        Nobody waits for it to be read. A process that reads no more reports no more either, and is ended before much has gathered.
        """
        stdin = None if self._child is None else self._child.stdin
        if stdin is not None and not stdin.is_closing():
            stdin.write(json.dumps(command).encode() + b"\n")

    def _place_told(self, place: dict[str, Any]) -> PeerAddress | None:
        host = self._settings.told_host
        return None if host is None else PeerAddress.model_validate({**place, "host": host or place["host"]})

    def _hear(self, said: dict[str, Any]) -> None:
        match said:
            case {"listening": place}:
                self._port = place["port"]
                self._address = self._place_told(place)
                log.info("seeder_listens", host=place["host"], port=self._port, told=self._address and self._address.host)
            case {"state": state}:
                self.state = state
            case {"first_sent": transfer, "at": at}:
                self.first_sent[transfer] = at
            case {"refused": words}:
                log.warning("seeder_refused", reason=words)
            case {"event": "PeerDropped" | "GaveUp"}:
                log.info("seeder_event", **{key: value for key, value in said.items() if key != "event"}, kind=said["event"])


def _make_key(path: Path) -> None:
    """The seeder's own Ed25519 key: the coordinator's never leaves its process."""
    if not path.is_file():
        path.touch(mode=0o600)
        path.chmod(0o600)
        write_durably(path, Ed25519PrivateKey.generate().private_bytes_raw().hex().encode())
        path.chmod(0o600)
