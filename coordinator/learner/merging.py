"""A weight with its adapter as one bf16 tensor: what is published, by the very loop that workers decode low-rank edges with.

So there is one definition of a version's bits, and whoever holds the first version and the factors makes them anew.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from p2p.codec.lowrank import Factors, Halves, merge_into

LEAST_A_THREAD = 1 << 20  # elements: fewer are done before a thread has started


def merged(base: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """bf16 [out, in] on the base's device: `base` plus scale · `up` · `down`, all of them rounded to bf16 first.

    Computed on the host, in as many threads as torch uses there.
    """
    words, factors = _bits(base).copy(), Factors(_bits(up), _bits(down))
    rows, columns = words.shape
    threads = max(1, min(torch.get_num_threads(), words.size // LEAST_A_THREAD))

    def part(number: int) -> None:
        start, stop = rows * number // threads, rows * (number + 1) // threads
        merge_into(words[start:stop].reshape(-1), factors, scale, first=start * columns)

    if threads == 1:
        part(0)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(part, range(threads)))
    return torch.from_numpy(words.view(np.int16)).view(torch.bfloat16).to(base.device)


def _bits(tensor: Tensor) -> Halves:
    """The tensor rounded to bf16, as bits on the host."""
    plain = tensor.detach().to(torch.bfloat16).cpu().contiguous()
    found: Halves = plain.view(torch.int16).numpy().view("<u2")
    return found
