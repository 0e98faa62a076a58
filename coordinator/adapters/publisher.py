"""Implements `service.job_ports.Publisher`: a child process encodes, this process signs (only it holds the identity key)."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from asyncio.subprocess import Process
from collections.abc import Callable, Sequence
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Any

import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.adapters.child import child_environment
from coordinator.adapters.encode_child import BATCH_MARK
from coordinator.service.job_ports import BaseSnapshot, PublishFailed, PublishInterrupted, SignedHop, SignedManifest
from coordinator.service.piece_names import PieceNames
from coordinator.service.ports import Clock
from p2p.adapters.piece_store import PieceStore
from p2p.domain.batches import text_hash
from p2p.domain.hops import hops_of
from p2p.domain.manifest import Manifest
from p2p.domain.signing import sign_batch, sign_hop, sign_manifest

OnBatch = Callable[[str, str], None]

log = structlog.get_logger()
LINE_LIMIT_BYTES = 64 << 20
TRIES = 3  # an encoder that was killed is started again: encoding the same directory again gives the same pieces


class ProcessPublisher:
    """Keeps one encoder child, started on first use and after a failure."""

    def __init__(
        self,
        store_dir: Path,
        key: Ed25519PrivateKey,
        clock: Clock,
        *,
        on_batch: OnBatch = lambda *_: None,
        deadline_s: float = 1800.0,
    ) -> None:
        """`on_batch` is told each piece batch (text, signature) while its edge is still being encoded."""
        self._on_batch = on_batch
        self._first_told_at = inf  # of the request under way
        self._store_dir = store_dir
        self._key = key
        self._clock = clock
        self._deadline_s = deadline_s
        self._child: Process | None = None
        self._turn = asyncio.Lock()
        self._names = PieceNames[str]()  # by the hash of the text: most of what is kept was kept the last time
        self._names_lock = threading.Lock()

    async def publish(
        self, directory: Path, *, job_id: str, version: int, canary_ids: Sequence[int], base: BaseSnapshot | None = None
    ) -> SignedManifest:
        """Encode in the child, sign here."""
        begun = self._clock.now()
        request = {
            "kind": "publish",
            "directory": str(directory),
            "store": str(self._store_dir),
            "job_id": job_id,
            "version": version,
            "canary_ids": list(canary_ids),
            "base": None if base is None else asdict(base),
        }
        text = (await self._encoded(request, f"version {version}"))["manifest"]
        manifest = Manifest.from_json(text)
        hops = tuple(self._sign_hop(hop.to_json()) for hop in hops_of(manifest))
        seconds = self._clock.now() - begun
        first_s = min(seconds, max(0.0, self._first_told_at - begun))
        return SignedManifest(text, sign_manifest(self._key, text), manifest.digest, seconds, first_s, hops, manifest.nbytes)

    async def add_edges(
        self, directory: Path, *, manifest: str, bases: Sequence[BaseSnapshot], keyframe: bool
    ) -> tuple[SignedHop, ...]:
        """Encode in the child, sign here."""
        request = {
            "kind": "add_edges",
            "directory": str(directory),
            "store": str(self._store_dir),
            "manifest": manifest,
            "bases": [asdict(base) for base in bases],
            "keyframe": keyframe,
        }
        answer = await self._encoded(request, f"edges of {directory.name}")
        return tuple(self._sign_hop(text) for text in answer["hops"])

    def _sign_hop(self, text: str) -> SignedHop:
        return SignedHop(text, sign_hop(self._key, text))

    async def _encoded(self, request: dict[str, object], what: str) -> dict[str, Any]:
        answer = await self._ask_again(json.dumps(request).encode() + b"\n")
        if "errno" in answer:  # the disk's fault, not the job's: an OSError pauses the job, PublishFailed would end it
            raise OSError(int(answer["errno"]), f"{what} could not be encoded: {answer['error']}")
        if "error" in answer:
            raise PublishFailed(f"{what} could not be encoded: {answer['error']}")
        return answer

    async def _ask_again(self, line: bytes) -> dict[str, Any]:
        """The encoder's answer, from a new one when it dies. Raises PublishFailed when that happens TRIES times."""
        for _ in range(TRIES):
            answer = await self._ask(line)
            if answer is not None:
                return answer
            log.warning("encoder_ended")
        raise PublishFailed(f"the encoder process ended without an answer, {TRIES} times")

    async def _ask(self, line: bytes) -> dict[str, Any] | None:
        """One request to one encoder; None when it ended before it answered."""
        async with self._turn:
            child = await self._running()
            assert child.stdin is not None
            assert child.stdout is not None
            self._first_told_at = inf
            try:
                async with asyncio.timeout(self._deadline_s):
                    child.stdin.write(line)
                    await child.stdin.drain()
                    reply = await self._reply(child.stdout)
            except TimeoutError:
                await self._drop()
                raise PublishInterrupted(f"the encoder process gave no answer within {self._deadline_s:g} s") from None
            except BaseException as error:
                # A half-read answer would be taken for the next request's: never reuse this child.
                await self._drop()
                if isinstance(error, ConnectionError):
                    raise PublishInterrupted("the encoder process ended") from error
                raise
            if not reply.endswith(b"\n"):
                await self._drop()
                raise PublishInterrupted("the encoder process ended without an answer")
            answer: dict[str, Any] = json.loads(reply)
            return answer

    async def _reply(self, lines: asyncio.StreamReader) -> bytes:
        """The answer's line; batches that are told before it are signed and passed on at once."""
        while True:
            line = await lines.readline()
            if not line.startswith(BATCH_MARK):
                return line
            is_first = self._first_told_at == inf
            self._first_told_at = self._clock.now() if is_first else self._first_told_at
            text = line.removeprefix(BATCH_MARK).decode().rstrip("\n")
            self._on_batch(text, sign_batch(self._key, text))

    async def _running(self) -> Process:
        if self._child is None or self._child.returncode is not None:
            self._child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "coordinator.adapters.encode_child",
                env=child_environment(),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=LINE_LIMIT_BYTES,
            )
        return self._child

    async def _drop(self) -> None:
        child, self._child = self._child, None
        if child is not None and child.returncode is None:
            child.kill()
            await child.wait()

    async def remove_pieces(self, texts: Sequence[str], *, kept: Sequence[str]) -> int:
        """Delete pieces that only `texts` name."""
        return await asyncio.to_thread(self._remove, texts, kept)

    async def keep_pieces(self, kept: Sequence[str]) -> int:
        """Delete what `kept` does not name."""
        return await asyncio.to_thread(self._keep, kept)

    def _pieces(self, texts: Sequence[str]) -> set[str]:
        with self._names_lock:
            return {name.hex() for text in texts for name in self._names.of(text_hash(text), text)}

    def _remove(self, texts: Sequence[str], kept: Sequence[str]) -> int:
        store, digests = PieceStore(self._store_dir), self._pieces(texts) - self._pieces(kept)
        for digest in digests:
            store.remove(digest)
        return len(digests)

    def _keep(self, kept: Sequence[str]) -> int:
        store = PieceStore(self._store_dir)
        return store.sweep() + store.keep_only(self._pieces(kept))

    async def close(self) -> None:
        """End the encoder."""
        await self._drop()
