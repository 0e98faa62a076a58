"""Implements `service.job_ports.Publisher`: a child process encodes, this process signs (only it holds the identity key)."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import Process
from collections.abc import Sequence
from pathlib import Path

import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.adapters.child import child_environment
from coordinator.service.job_ports import PublishFailed, PublishInterrupted, SignedManifest
from coordinator.service.ports import Clock
from p2p.adapters.piece_store import PieceStore
from p2p.domain.manifest import Manifest
from p2p.domain.signing import sign_manifest

log = structlog.get_logger()
LINE_LIMIT_BYTES = 64 << 20
TRIES = 3  # an encoder that was killed is started again: encoding the same directory again gives the same pieces


class ProcessPublisher:
    """Keeps one encoder child, started on first use and after a failure."""

    def __init__(self, store_dir: Path, key: Ed25519PrivateKey, clock: Clock, *, deadline_s: float = 1800.0) -> None:
        self._store_dir = store_dir
        self._key = key
        self._clock = clock
        self._deadline_s = deadline_s
        self._child: Process | None = None
        self._turn = asyncio.Lock()

    async def publish(self, directory: Path, *, job_id: str, version: int, canary_ids: Sequence[int]) -> SignedManifest:
        """Encode in the child, sign here."""
        begun = self._clock.now()
        request = {
            "directory": str(directory),
            "store": str(self._store_dir),
            "job_id": job_id,
            "version": version,
            "canary_ids": list(canary_ids),
        }
        answer = await self._ask_again(json.dumps(request).encode() + b"\n")
        if "errno" in answer:  # the disk's fault, not the job's: an OSError pauses the job, PublishFailed would end it
            raise OSError(int(answer["errno"]), f"version {version} could not be encoded: {answer['error']}")
        if "interrupted" in answer:
            raise PublishInterrupted(f"version {version} could not be encoded now: {answer['interrupted']}")
        if "error" in answer:
            raise PublishFailed(f"version {version} could not be encoded: {answer['error']}")
        text = answer["manifest"]
        return SignedManifest(text, sign_manifest(self._key, text), answer["digest"], self._clock.now() - begun)

    async def _ask_again(self, line: bytes) -> dict[str, str]:
        """The encoder's answer, from a new one when it dies. Raises PublishFailed when that happens TRIES times."""
        for _ in range(TRIES):
            answer = await self._ask(line)
            if answer is not None:
                return answer
            log.warning("encoder_ended")
        raise PublishFailed(f"the encoder process ended without an answer, {TRIES} times")

    async def _ask(self, line: bytes) -> dict[str, str] | None:
        """One request to one encoder; None when it ended before it answered."""
        async with self._turn:
            child = await self._running()
            assert child.stdin is not None
            assert child.stdout is not None
            try:
                async with asyncio.timeout(self._deadline_s):
                    child.stdin.write(line)
                    await child.stdin.drain()
                    reply = await child.stdout.readline()
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
            answer: dict[str, str] = json.loads(reply)
            return answer

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

    async def remove_pieces(self, manifests: Sequence[str], *, kept: Sequence[str]) -> int:
        """Delete pieces that only `manifests` name."""
        return await asyncio.to_thread(_remove, self._store_dir, manifests, kept)

    async def keep_pieces(self, kept: Sequence[str]) -> int:
        """Delete what `kept` does not name."""
        return await asyncio.to_thread(_keep, self._store_dir, kept)

    async def close(self) -> None:
        """End the encoder."""
        await self._drop()


def _pieces(manifests: Sequence[str]) -> set[str]:
    found: set[str] = set()
    for text in manifests:
        manifest = Manifest.from_json(text)
        found.update(piece.digest for edge in manifest.edges for piece in edge.pieces)
        found.update(piece.digest for entry in manifest.files for piece in entry.pieces)
    return found


def _remove(store_dir: Path, manifests: Sequence[str], kept: Sequence[str]) -> int:
    store, digests = PieceStore(store_dir), _pieces(manifests) - _pieces(kept)
    for digest in digests:
        store.remove(digest)
    return len(digests)


def _keep(store_dir: Path, kept: Sequence[str]) -> int:
    store = PieceStore(store_dir)
    return store.sweep() + store.keep_only(_pieces(kept))
