"""Decodes submissions: a frame becomes a head and completions, or a refusal that names what is malformed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from coordinator.domain.admission import Submitted
from coordinator.service.worker_messages import invalid_message
from coordinator.service.worker_refusals import ProtocolRefusal
from coordinator.wire.frames import FrameError, declared_bytes, decode_frame
from coordinator.wire.messages import SubmitHead

ARRAYS: Mapping[str, type[np.generic]] = {"token_ids": np.int32, "logprobs": np.float32, "versions": np.int32}
LARGE_FRAME_BYTES = 512 << 10


@dataclass(frozen=True, slots=True)
class Submission:
    """A decoded submission: its head, its completions, where each begins in the arrays, and the bytes as sent."""

    head: SubmitHead
    completions: tuple[Submitted, ...]
    starts: tuple[int, ...]
    body: bytes


def is_large(body: bytes) -> bool:
    """Whether decoding takes so long that it belongs in a thread."""
    return max(len(body), declared_bytes(body)) > LARGE_FRAME_BYTES


def decode(body: bytes) -> Submission:
    """The submission in a frame. Raises ProtocolRefusal naming what is malformed."""
    try:
        raw, arrays = decode_frame(body)
    except FrameError as error:
        raise ProtocolRefusal(422, "invalid_frame", str(error), field="body", fix="send a frame as PROTOCOL.md draws it") from error
    try:
        head = SubmitHead.model_validate_json(raw)
    except ValidationError as error:
        raise invalid_message(error) from error
    total = sum(completion.length for completion in head.completions)
    _check_arrays(arrays, total)
    token_ids = arrays["token_ids"].astype(np.int32, copy=False)
    logprobs = arrays["logprobs"].astype(np.float32, copy=False)
    versions = arrays["versions"].astype(np.int32, copy=False)
    starts = [0, *accumulate(completion.length for completion in head.completions)]
    completions = tuple(
        Submitted(
            slot=done.slot,
            token_ids=token_ids[start : start + done.length],
            logprobs=logprobs[start : start + done.length],
            versions=versions[start : start + done.length],
            stop_reason=done.stop_reason,
            generate_s=done.generate_s,
        )
        for done, start in zip(head.completions, starts, strict=False)
    )
    return Submission(head, completions, tuple(starts[:-1]), body)


def _check_arrays(arrays: Mapping[str, NDArray[np.generic]], total: int) -> None:
    """Exactly the three arrays, one-dimensional, of the right type, and as long as the head says."""
    fix = f"send exactly {', '.join(f'{name} {np.dtype(dtype)} [T]' for name, dtype in ARRAYS.items())}"
    if set(arrays) != set(ARRAYS):
        words = f"the body holds arrays {sorted(arrays)[:8]}"
        raise ProtocolRefusal(422, "invalid_frame", words, field="body", fix=fix)
    for name, dtype in ARRAYS.items():
        array = arrays[name]
        if array.dtype != dtype or array.ndim != 1:
            words = f"array {name} is {array.dtype} of shape {list(array.shape)}"
            raise ProtocolRefusal(422, "invalid_frame", words, field=name, fix=fix)
        if len(array) != total:
            words = f"array {name} holds {len(array)} tokens, the head's lengths add up to {total}"
            raise ProtocolRefusal(422, "invalid_frame", words, field=name, fix="make them agree")
