"""Host memory that each of two ranks takes to start: a model in bf16, read whole in fp32 or left in its file until it is sharded."""

from __future__ import annotations

import multiprocessing
import tempfile
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from coordinator.learner import model, step, team
from coordinator.learner.process import make_deterministic
from coordinator.wire.job import JobConfig

RANKS = 2
MIB = 1 << 20
READERS = {"whole": model.load, "mapped": model.load_mapped}


def main(layers: int = 24, hidden: int = 1024) -> None:
    """Print the peak of resident memory of each rank over what it had before it read the model, as a share of the fp32 weights too."""
    with tempfile.TemporaryDirectory(prefix="bench-ranks-") as folder:
        place = Path(folder)
        whole = write_model(place / "model", layers, hidden) * 4 / MIB
        print(f"{whole / 4 * MIB / 1e6:.0f} M parameters, {whole:.0f} MiB in fp32, {RANKS} ranks")
        print(f"{'read':<10}{'rank 0 MiB':>12}{'rank 1 MiB':>12}{'share':>8}{'after MiB':>12}", flush=True)
        for name in READERS:
            found = together(place, name)
            peaks = [most for most, _ in found]
            after = max(now for _, now in found)
            print(f"{name:<10}{peaks[0]:>12.0f}{peaks[1]:>12.0f}{max(peaks) / whole:>8.2f}{after:>12.0f}", flush=True)


def write_model(directory: Path, layers: int, hidden: int) -> int:
    """Random weights, of which the embeddings are a small part, as in a model of 30 G parameters; how many."""
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=hidden // 8,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        architectures=["Qwen3ForCausalLM"],
    )
    built = Qwen3ForCausalLM(shape).bfloat16()
    built.save_pretrained(directory)
    return int(built.num_parameters())


def together(place: Path, name: str) -> list[tuple[float, float]]:
    """Of each rank, MiB more than before it read: the peak, and what it holds once it is ready."""
    context = multiprocessing.get_context("spawn")
    results: Queue[Any] = context.Queue()
    ranks = [context.Process(target=measure, args=(results, place, name, rank)) for rank in range(RANKS)]
    for each in ranks:
        each.start()
    found = dict(results.get(timeout=600) for _ in ranks)
    for each in ranks:
        each.join()
    (place / f"meeting-{name}").unlink(missing_ok=True)
    return [found[rank] for rank in range(RANKS)]


def measure(results: Queue[Any], place: Path, name: str, rank: int) -> None:
    """As one rank."""
    make_deterministic()
    here = team.join(rank, RANKS, meeting=place / f"meeting-{name}", device="cpu")
    config = JobConfig.model_validate(
        {"name": "bench", "model": "m", "environment": {"type": "digit_sort"}, "budget": {"steps": 1}, "learner": {"ranks": RANKS}}
    )
    before = resident()["VmRSS"]
    held = step.start(READERS[name](place / "model"), config, team=here)
    after = resident()
    here.total([float(held.step)])  # neither leaves before the other is ready
    results.put((rank, (after["VmHWM"] - before, after["VmRSS"] - before)))


def resident() -> dict[str, float]:
    """MiB of this process in memory (proc(5)): VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {
        name: int(value.split()[0]) / 1024
        for name, _, value in (line.partition(":") for line in lines)
        if name in ("VmRSS", "VmHWM")
    }
