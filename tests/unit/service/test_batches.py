"""The file of a sealed batch: the same bytes whenever it is made from the same rows and blobs."""

from __future__ import annotations

import numpy as np
from safetensors.numpy import load

from coordinator.domain.model import Group, GroupState, Rollout, RolloutState
from coordinator.service.batches import batch_file
from coordinator.wire.frames import encode_frame


def test_a_batch_made_again_has_the_same_bytes() -> None:
    """The library writes its metadata in any order: without care these 24 would be several files."""
    group = Group("g", "j", 0, 0, (2, 3), 2, GroupState.SEALED, 1.0)
    rows = [
        Rollout("g", slot, "j", 0, RolloutState.SCORED, blob="b", blob_start=slot, length=1, reward=float(slot), stop_reason="stop")
        for slot in range(2)
    ]
    values = {"token_ids": np.array([4, 5], np.int32), "logprobs": np.full(2, -0.5, np.float32), "versions": np.zeros(2, np.int32)}
    made = [batch_file("j", 3, [group], {"g": rows}, frames={"b": encode_frame(b"{}", values)}, zero=set()) for _ in range(24)]
    assert set(made) == {made[0]}
    assert load(made[0])["token_ids"].tolist() == [4, 5]
    assert int.from_bytes(made[0][:8], "little") % 8 == 0
