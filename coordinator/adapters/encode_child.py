"""A process that encodes snapshots: one JSON request a line on standard input, one JSON answer a line on standard output.

It ends when its input closes. The encoding itself is `p2p.adapters.publish`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from p2p.adapters.publish import publish
from p2p.errors import SwarmError


def main() -> None:
    """Answer until the input ends."""
    for line in sys.stdin:
        sys.stdout.write(json.dumps(_answer(json.loads(line))) + "\n")
        sys.stdout.flush()


def _answer(request: dict[str, object]) -> dict[str, str]:
    try:
        manifest = publish(
            Path(str(request["directory"])),
            Path(str(request["store"])),
            job_id=str(request["job_id"]),
            version=int(str(request["version"])),
            canary_ids=tuple(request["canary_ids"]),  # type: ignore[arg-type]
        )
    except SwarmError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    except OSError as error:
        return {"error": f"{type(error).__name__}: {error}", "errno": str(error.errno or 5)}
    return {"manifest": manifest.to_json(), "digest": manifest.digest}


if __name__ == "__main__":
    main()
