"""What the figures take for given: models, cards, prices with date and source, links. Printed beside each figure.

Prices and token rates are dated points from public lists and benchmarks, examples and not defaults. Where none was found it says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GROUP_SIZE, GROUPS = 16, 128  # G, B: R = 2,048 rollouts a step
PROMPT_TOKENS = 200.0
MEAN_TOKENS, CV, MOST_TOKENS = 1500.0, 0.7, 8192
H100_FLOPS, MFU = 989e12, 0.40  # dense bf16, and the share of it that training reaches
FLOPS_PER_PARAMETER = 8.0  # a token: forward and backward 6, log-probs of the current policy 2
HEADROOM = 1.15
SEED = 0


MEMORY_SHARE = 0.9  # of a card that weights, keys and values may fill (vLLM's default)
KV_BYTES = 2 * 36 * 8 * 128 * 2  # a token: keys and values of 36 layers with 8 heads of 128 in 16 bits, Qwen3-4B and Qwen3-8B alike


@dataclass(frozen=True, slots=True)
class Card:
    """A card: its memory, and tokens per second by completions at once, from 1 on, of some model: only the shape counts."""

    name: str
    memory_bytes: float
    curve: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """Tokens per second of a model on a card, with so many completions at once."""

    users: int
    tokens_per_s: float


H100 = Card("H100", 81_559 * 2**20, ((1, 214.0), (16, 3027.0), (64, 8621.0), (128, 12176.0), (256, 15264.0)))  # 8B fp8
RTX4090 = Card("RTX 4090", 24_564 * 2**20, ((1, 98.0), (16, 1150.0), (64, 2954.0)))  # Qwen3.5-4B bf16


@dataclass(frozen=True, slots=True)
class Model:
    """A policy. Bytes on the wire: as bf16 (the paper's), as our keyframe, as our delta at a learning rate of 1e-6."""

    name: str
    parameters: float
    learner_cards: int  # H100
    measured: Mapping[str, Measured]  # by card
    bf16_bytes: float
    keyframe_bytes: float
    delta_bytes: float

    def train_s(self, mean_tokens: float = MEAN_TOKENS) -> float:
        """One step on the learner's cards."""
        tokens = GROUP_SIZE * GROUPS * (PROMPT_TOKENS + mean_tokens)
        return FLOPS_PER_PARAMETER * self.parameters * tokens / (self.learner_cards * H100_FLOPS * MFU)


ON_4B = {H100.name: Measured(396, 20_000.0), RTX4090.name: Measured(64, 2954.0)}
ON_8B = {H100.name: Measured(396, 13_322.0), RTX4090.name: Measured(48, 2380.0)}
SMALL = Model("4B", 4.0e9, 4, ON_4B, 8.0e9, 5.3e9, 30e6)
LARGE = Model("8B", 8.2e9, 8, ON_8B, 16.4e9, 10.7e9, 61e6)
MODELS = (SMALL, LARGE)


@dataclass(frozen=True, slots=True)
class Prices:
    """USD per card and hour, both sides."""

    name: str
    h100: float
    rtx4090: float
    source: str


PRICES = (
    Prices(
        "community",
        2.69,
        0.34,
        "RunPod community list: H100 SXM 2.69 (2026-11-09, data-receipts 109-gpu-pricing), RTX 4090 0.34 (2026-09-25, silybench-data)",
    ),
    Prices(
        "secure + community",
        3.99,
        0.34,
        "RunPod secure H100 SXM 3.99 (2026-11-09, data-receipts); RTX 4090 community 0.34 (2026-09-25, silybench-data)",
    ),
    Prices(
        "secure",
        3.99,
        0.74,
        "RunPod secure list: H100 SXM 3.99 (2026-11-09, data-receipts), RTX 4090 0.74 (2026-09-25, silybench-data)",
    ),
    Prices(
        "cloud + community",
        6.88,
        0.34,
        "AWS p5 6.88 per H100 (2026-11-09, data-receipts); RTX 4090 community 0.34 (2026-09-25, silybench-data)",
    ),
)

WIDE_AREA = {"up_mbps": 500.0, "down_mbps": 500.0}  # a hosted RTX 4090
DATA_CENTRE = {"up_mbps": 10_000.0, "down_mbps": 10_000.0}
SEEDER_MBPS = 1000.0
RTT_S = 0.05
CHURN_PER_HOUR = 0.05  # of hosted consumer cards: assumed
PAPER_SAVING = (0.333, 0.363)  # stated by summaries of the paper: hardware cost, 4B and 8B together


BYTES = (
    "bytes of a version, 4B / 8B: bf16 8.0 / 16.4 GB (the paper's), our keyframe 5.3 / 10.7 GB, our delta 30 / 61 MB (measured on gradients at"
    " a learning rate of 1e-6)"
)


def common() -> list[str]:
    """In words, for all figures."""
    return [
        f"R = {GROUP_SIZE * GROUPS:,} rollouts a step (G = {GROUP_SIZE}, B = {GROUPS}); completions log-normal, mean {MEAN_TOKENS:,.0f}"
        f" tokens, cv {CV}, at most {MOST_TOKENS:,}; prompts of {PROMPT_TOKENS:,.0f}",
        f"T_train: {FLOPS_PER_PARAMETER:g} FLOP per parameter and token at {MFU:.0%} of an H100's {H100_FLOPS / 1e12:,.0f} TFLOP/s:"
        f" {SMALL.train_s():.0f} s for 4B on {SMALL.learner_cards} cards, {LARGE.train_s():.0f} s for 8B on {LARGE.learner_cards}",
        "RTX 4090: 2,954 tokens/s with 64 users (Qwen3.5-4B bf16, vLLM 0.17, aaronzhfeng/gpu-inference, 2026-03-10); 8B about 2,380"
        " (R1-Distill-Llama-8B 16-bit, databasemart.com; reached with 48 users, assumed)",
        "H100 SXM: 13,322 tokens/s with 396 users (Qwen3-8B bf16, vLLM 0.30.0, silybench-data, 2026-09-24); 4B: 20,000 assumed, no dated"
        " figure found (half the weights, the same KV cache)",
        f"fewer users where {KV_BYTES:,} bytes of keys and values a token do not fit beside the weights into {MEMORY_SHARE:.0%} of the card's"
        " memory; their rate by a measured curve (H100: Qwen3-8B fp8, 214 tokens/s with 1 user to 15,264 with 256, silybench-data;"
        " RTX 4090: Qwen3.5-4B, 98 with 1 user, 1,150 with 16, 2,954 with 64, the source above)",
        f"activation with headroom {HEADROOM}; {CHURN_PER_HOUR:.0%} of the RTX 4090s are lost within an hour (assumed), others come within"
        " 15 minutes; traffic is not charged",
        BYTES,
    ]
