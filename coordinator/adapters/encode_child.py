"""A process that encodes snapshots: one JSON request a line on standard input, one JSON answer a line on standard output.

Before the answer come the edges' piece batches, a line each that starts with BATCH_MARK. It ends when its input closes. The encoding
itself is `p2p.adapters.publish`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from threading import Thread
from typing import Any

from p2p.adapters.publish import Base, Encoder
from p2p.codec.delta import warm_up
from p2p.domain.hops import Hop
from p2p.domain.manifest import Manifest
from p2p.errors import SwarmError

BATCH_MARK = b"batch "
WEIGHTS = ("BF16",)  # what learners publish: compiled before the first delta is due


def main() -> None:
    """Answer until the input ends."""
    Thread(target=warm_up, args=(WEIGHTS,), daemon=True).start()
    encoders: dict[str, Encoder] = {}
    for line in sys.stdin:
        request = json.loads(line)
        encoder = encoders.setdefault(request["store"], Encoder(Path(request["store"])))
        _say(json.dumps(_answer(encoder, request)))


def _answer(encoder: Encoder, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return _publish(encoder, request) if request["kind"] == "publish" else _add_edges(encoder, request)
    except SwarmError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    except OSError as error:
        return {"error": f"{type(error).__name__}: {error}", "errno": str(error.errno or 5)}


def _publish(encoder: Encoder, request: dict[str, Any]) -> dict[str, Any]:
    manifest = encoder.publish(
        Path(request["directory"]),
        job_id=request["job_id"],
        version=request["version"],
        canary_ids=tuple(request["canary_ids"]),
        base=None if request["base"] is None else _base(request["base"]),
        on_batch=_tell,
    )
    return {"manifest": manifest.to_json()}


def _add_edges(encoder: Encoder, request: dict[str, Any]) -> dict[str, Any]:
    hops = encoder.add_edges(
        Path(request["directory"]),
        Manifest.from_json(request["manifest"]),
        bases=[_base(base) for base in request["bases"]],
        keyframe=request["keyframe"],
        on_batch=_tell,
    )
    return {"hops": [hop.to_json() for hop in hops]}


def _base(fields: dict[str, Any]) -> Base:
    instead = fields["instead"]
    given = {**fields, "directory": Path(fields["directory"]), "instead": None if instead is None else _base(instead)}
    return Base(**{**given, "path": tuple(Hop.from_json(text) for text in fields["path"])})


def _tell(batch: str) -> None:
    _say(BATCH_MARK.decode() + batch)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
