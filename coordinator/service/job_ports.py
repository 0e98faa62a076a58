"""What driving a job needs from the outside world, besides the store: the learner, the publisher and the data plane."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from coordinator.domain.model import Job
from coordinator.service.ports import DataPlane
from coordinator.wire.learner_link import Answer, Request
from p2p.domain.lineage import DELTA


def learner_log(data_dir: Path, job_id: str) -> Path:
    """Where what a job's learners print lies."""
    return data_dir / "logs" / f"learner-{job_id}.log"


class LearnerLost(Exception):
    """The learner process ended, broke its protocol, or let a deadline pass; it must be started anew."""


class LearnerRefused(Exception):
    """The learner answered that it cannot do what was asked, and a restart would not help; the words say why."""


class LearnerHostFault(Exception):
    """The host refused what the learner needs (a full disk): the job should pause until someone makes room."""


class Learner(Protocol):
    """One started learner process."""

    async def ask(self, request: Request, *, deadline_s: float) -> Answer:
        """One request, its answer. Raises LearnerLost, LearnerRefused or LearnerHostFault."""
        ...

    async def close(self) -> None:
        """End the process; it is gone when this returns."""
        ...


class LearnerStarter(Protocol):
    """Starts learner processes."""

    async def start(self, job_id: str, fence: int) -> Learner:
        """A connected process that waits for Start. Raises LearnerLost."""
        ...


@dataclass(frozen=True, slots=True)
class SignedHop:
    """One edge with both its ends (`p2p.domain.hops`), signed."""

    text: str
    signature: str


@dataclass(frozen=True, slots=True)
class SignedManifest:
    """An encoded snapshot, ready to be announced, and its edges apart."""

    text: str
    signature: str
    digest: str
    encode_s: float
    first_piece_s: float  # from the start of encoding until the first piece could leave
    hops: tuple[SignedHop, ...] = ()
    full_bytes: int = 0  # raw bytes of its tensors: what a snapshot without a codec would take


@dataclass(frozen=True, slots=True)
class BaseSnapshot:
    """A version to encode against. `expected_bytes` is what the edge may take; 0: not known.

    `link_bytes_per_s`: how fast a delta spreads, as far as known. `encoding`: delta or lowrank. `instead`: what to encode against where
    this one does not do. `path`, where the directory is gone: documents of the hops by which its bits can be made again, a keyframe first.
    """

    version: int
    digest: str
    directory: str
    expected_bytes: int = 0
    link_bytes_per_s: float = 12.5e6
    encoding: str = DELTA
    instead: BaseSnapshot | None = None
    path: tuple[str, ...] = ()


class Publisher(Protocol):
    """Turns a Hugging Face directory into pieces and a signed manifest, in a process beside the learner."""

    async def publish(
        self, directory: Path, *, job_id: str, version: int, canary_ids: Sequence[int], base: BaseSnapshot | None = None
    ) -> SignedManifest:
        """One edge against `base`; keyframes if there is none that fits. Pieces are durable when this returns.

        Raises PublishFailed, PublishInterrupted.
        """
        ...

    async def add_edges(
        self, directory: Path, *, manifest: str, bases: Sequence[BaseSnapshot], keyframe: bool
    ) -> tuple[SignedHop, ...]:
        """More edges to a published version, for the bases that fit. Raises PublishFailed, PublishInterrupted."""
        ...

    async def remove_pieces(self, texts: Sequence[str], *, kept: Sequence[str]) -> int:
        """Delete the pieces that only `texts` (manifests and hops) name and none of `kept` does; the number deleted."""
        ...

    async def keep_pieces(self, kept: Sequence[str]) -> int:
        """Delete every piece that none of `kept` (texts) names, and what killed writes left; the number deleted."""
        ...


class PublishFailed(Exception):
    """The snapshot could not be encoded; the words say why."""


class PublishInterrupted(Exception):
    """The encoder ended, hung, or the disk refused: nothing is wrong with the snapshot, it may be encoded again."""


class PlaneStarter(Protocol):
    """Builds the data plane of a job."""

    def plane(self, job: Job) -> DataPlane:
        """A data plane that was not started yet."""
        ...
