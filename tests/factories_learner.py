"""What the learner's tests are made with: a very small model, batches, the job's settings, and the real process on a socket."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from safetensors.numpy import save
from transformers import Qwen3Config, Qwen3ForCausalLM

from coordinator.learner.batch_file import Batch
from coordinator.wire.job import JobConfig
from coordinator.wire.learner_link import ANSWERS, BATCH_FORMAT, Answer, LinkMessage

VOCAB = 32
EOS = 1
JOB = "job-1"
ANSWER_TIMEOUT_S = 120.0
DEVICE = os.environ.get("ECHO2_TEST_DEVICE", "cpu")  # `make gpu` sets cuda

Arrays = dict[str, NDArray[Any]]


def config(
    *,
    temperature: float = 1.0,
    seed: int = 0,
    learner: dict[str, Any] | None = None,
    lora: dict[str, Any] | None = None,
    **algorithm: Any,
) -> JobConfig:
    """A job; other keywords go to its [algorithm]."""
    return JobConfig.model_validate(
        {
            "name": "test",
            "model": "/models/tiny",
            "seed": seed,
            "environment": {"type": "digit_sort"},
            "algorithm": {"group_size": 4, "groups_per_step": 2, "learning_rate": 1e-3, **algorithm},
            "learner": learner or {},
            "lora": lora,
            "sampling": {"max_new_tokens": 8, "temperature": temperature},
            "budget": {"steps": 10},
        }
    )


def model_directory(path: Path, *, seed: int = 0, tied: bool = True) -> Path:
    """A Hugging Face directory of a model with a few thousand parameters and large, well-mixed weights."""
    torch.manual_seed(seed)
    shape = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.3,
        tie_word_embeddings=tied,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=EOS,
        architectures=["Qwen3ForCausalLM"],
    )
    Qwen3ForCausalLM(shape).save_pretrained(path)
    return path


def arrays(*, seed: int = 0, step: int = 3, groups: int = 2, group_size: int = 4) -> Arrays:
    """A valid batch: prompts of 2 to 5 tokens, completions of 1 to 8, rewards 0 and 1, all trained."""
    draw = np.random.default_rng(seed)
    rollouts = groups * group_size
    prompt_lengths = np.repeat(draw.integers(2, 6, groups), group_size).astype(np.int32)
    lengths = draw.integers(1, 9, rollouts).astype(np.int32)
    rewards = draw.integers(0, 2, rollouts).astype(np.float32)
    rewards[::group_size], rewards[1::group_size] = 0, 1
    return {
        "prompt_ids": draw.integers(2, VOCAB, prompt_lengths.sum()).astype(np.int32),
        "prompt_lengths": prompt_lengths,
        "token_ids": draw.integers(2, VOCAB, lengths.sum()).astype(np.int32),
        "lengths": lengths,
        "logprobs": -draw.gamma(4.0, 1.0, lengths.sum()).astype(np.float32),
        "versions": np.repeat(draw.integers(max(0, step - 3), step + 1, rollouts), lengths).astype(np.int32),
        "rewards": rewards,
        "group": np.repeat(np.arange(groups), group_size).astype(np.int32),
        "truncated": np.zeros(rollouts, np.uint8),
        "weight": np.ones(rollouts, np.float32),
    }


def batch(*, step: int = 3, seed: int = 0, **overrides: NDArray[Any]) -> Batch:
    """The same as a value."""
    values = arrays(seed=seed, step=step) | overrides
    return Batch(step=step, **({"sampled": np.ones(values["lengths"].sum(), np.bool_)} | values))


def file_bytes(values: Arrays, *, step: int, job: str = JOB, form: str = BATCH_FORMAT) -> bytes:
    """A batch file as the coordinator seals it."""
    return save(values, metadata={"job": job, "step": str(step), "format": form})


def sealed(directory: Path, step: int, *, seed: int | None = None) -> tuple[Path, str]:
    """A batch file for `step` and its digest; a function of the step."""
    data = file_bytes(arrays(seed=100 + step if seed is None else seed, step=step), step=step)
    path = directory / f"batch-{step}.safetensors"
    path.write_bytes(data)
    return path, blake3(data).hexdigest()


class LearnerProcess:
    """The real process, and the coordinator's end of its socket. Use as a context manager."""

    def __init__(self, folder: Path, *extra: str) -> None:
        path = folder / "learner.sock"
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._listener.settimeout(ANSWER_TIMEOUT_S)
        command = [sys.executable, "-m", "coordinator.learner.process", "--socket", str(path), "--device", DEVICE, *extra]
        self._log = (folder / "learner.log").open("ab")
        self.process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=self._log)
        self.link, _ = self._listener.accept()
        self.link.settimeout(ANSWER_TIMEOUT_S)
        self._lines = self.link.makefile("rb")

    def __enter__(self) -> LearnerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(10)
        for each in (self._lines, self.link, self._listener, self._log):
            each.close()

    def send(self, line: bytes) -> None:
        self.link.sendall(line + b"\n")

    def receive(self) -> Answer | None:
        """The next answer; None: the process closed the link."""
        try:
            line = self._lines.readline()
        except ConnectionResetError:
            return None
        return ANSWERS.validate_json(line) if line else None

    def ask(self, request: LinkMessage) -> Answer | None:
        self.send(request.model_dump_json().encode())
        return self.receive()
