"""News of edges that are being encoded: from the encoder to whoever waits for their next pieces."""

from __future__ import annotations

from coordinator.service.deps import NEWS, Deps


def hear(deps: Deps, text: str, signature: str) -> None:
    """A batch came from the encoder: who waits for it is told."""
    deps.wake.notify(topic(deps.transfers.add(text, signature)))
    deps.wake.notify(NEWS)


def close(deps: Deps, job_id: str) -> None:
    """Nothing of the job is on its way any more: its rows say it all, or the encoder gave up."""
    for transfer in deps.transfers.close(job_id):
        deps.wake.notify(topic(transfer))
    deps.wake.notify(NEWS)


def topic(transfer: str) -> str:
    """What `deps.wake` calls news of a transfer."""
    return f"transfer/{transfer}"
