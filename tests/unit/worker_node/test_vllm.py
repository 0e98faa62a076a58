"""The vLLM engine's decisions: what a server must offer, what spans mean, when it is started again, what fits."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_node.domain import vllm_api, vllm_fit, vllm_recovery

DESCRIPTION = {"paths": {path: {method: {}} for method, path in vllm_api.ROUTES}, "words": {word: {} for word in vllm_api.WORDS}}
SMOLLM2 = vllm_fit.Shape(layers=30, kv_heads=3, head_dim=64, context=8192, vocab=49152, file_bytes=269_030_016, heads=9)
QWEN3_4B = vllm_fit.Shape(layers=36, kv_heads=8, head_dim=128, context=40960, vocab=151936, file_bytes=8_045_000_000, heads=32)
CPU = vllm_fit.Room("cpu", 16 << 30, share=0.9, cards=1, dtype="float32", slots=16)
GPU = vllm_fit.Room("gpu", 24 << 30, share=0.9, cards=1, dtype="bfloat16", slots=32)


@pytest.mark.parametrize("version", ["0.32.0", "0.33.1rc2+cu130", "1.0.0"])
def test_new_enough(version: str) -> None:
    assert vllm_api.too_old(version) == ""


@pytest.mark.parametrize(("version", "words"), [("0.31.4", "install 0.32"), ("0.9", "install 0.32"), ("dev", "cannot be read")])
def test_too_old_or_unreadable(version: str, words: str) -> None:
    assert words in vllm_api.too_old(version)


def test_what_is_missing_is_named() -> None:
    """Another method at the same path does not count."""
    assert vllm_api.lacking(DESCRIPTION, json.dumps(DESCRIPTION)) == []
    other = {
        "paths": {path: methods for path, methods in DESCRIPTION["paths"].items() if path != "/pause"} | {"/resume": {"get": {}}}
    }
    text = json.dumps(other | {"words": ["token_ids", "prompt_logprobs", "weight_version", "update_info"]})
    assert vllm_api.lacking(other, text) == ["POST /pause", "POST /resume", "cache_salt"]


def spans(*parts: tuple[str, int, int]) -> list[dict[str, object]]:
    return [{"version": version, "start": start, "end": end} for version, start, end in parts]


def test_spans_give_each_token_its_version() -> None:
    assert vllm_api.token_versions(spans(("7.1", 0, 2), ("8.4", 2, 5)), {"7.1": 7, "8.4": 8}, 5) == (7, 7, 8, 8, 8)


@pytest.mark.parametrize(
    ("given_spans", "words"),
    [
        (None, "0 of 3"),
        (spans(("a", 0, 2)), "2 of 3"),
        (spans(("a", 0, 2), ("b", 1, 3)), "does not follow"),
        (spans(("a", 0, -1)), "does not follow"),
        (spans(("c", 0, 3)), "unknown"),
        (spans(("b", 0, 2), ("a", 2, 3)), "older"),
    ],
)
def test_spans_that_do_not_fit_are_refused(given_spans: list[dict[str, object]] | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        vllm_api.token_versions(given_spans, {"a": 1, "b": 2}, 3)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_any_contiguous_spans_are_read_back(lengths: list[int]) -> None:
    starts = [sum(lengths[:at]) for at in range(len(lengths) + 1)]
    parts = [(f"{at}", starts[at], starts[at + 1]) for at in range(len(lengths))]
    versions = vllm_api.token_versions(spans(*parts), {f"{at}": at for at in range(len(lengths))}, starts[-1])
    assert [versions.count(at) for at in range(len(lengths))] == lengths
    assert list(versions) == sorted(versions)


def test_the_token_counter_is_summed_over_engines() -> None:
    page = 'x 1\nvllm:generation_tokens_total{engine="0"} 12.0\nvllm:generation_tokens_total{engine="1"} 3e1\nvllm:generation_tokens 9\n'
    assert vllm_api.generated_tokens(page) == 42.0
    assert vllm_api.generated_tokens("vllm:generation_tokens_created 7\n") is None


def test_progress_is_tokens_and_the_share_of_the_cache() -> None:
    """While a long prompt is computed no token comes, but its cache grows."""
    page = 'vllm:generation_tokens_total{engine="0"} 12.0\nvllm:kv_cache_usage_perc{engine="0"} 2.5e-05\n'
    assert vllm_api.progress(page) == (12.0, 2.5e-05)
    assert vllm_api.progress('vllm:kv_cache_usage_perc{engine="0"} 0.5\n') is None
    assert vllm_api.progress("vllm:generation_tokens_total 3\n") == (3.0, 0.0)


def test_a_suspect_runs_alone() -> None:
    """Two deaths with a request in the server make it one; a third with it alone blames it, before the server's own fourth."""
    assert vllm_recovery.may_join(0, [0, 1])
    assert vllm_recovery.may_join(1, [])
    assert vllm_recovery.may_join(2, [])
    assert not vllm_recovery.may_join(2, [0])
    assert not vllm_recovery.may_join(0, [0, 2])
    assert vllm_recovery.to_blame(2) == ""
    assert "died 3 times with it" in vllm_recovery.to_blame(3)
    assert vllm_recovery.ALONE_AFTER < vllm_recovery.GIVEN_UP_AFTER < vllm_recovery.MOST_DEATHS


def test_a_server_that_keeps_dying_is_given_up() -> None:
    """Four deaths in half an hour; old ones are forgotten."""
    now = 10_000.0
    assert vllm_recovery.give_up([now - 5, now - 3, now], now) == ""
    assert vllm_recovery.give_up([now - 1800, now - 5, now - 3, now], now) == ""
    assert "died 4 times within 30 minutes" in vllm_recovery.give_up([now - 1799, now - 5, now - 3, now], now)


def test_a_server_without_progress_hangs() -> None:
    assert vllm_recovery.hangs(moved_at=10.0, now=189.0) == ""
    assert vllm_recovery.hangs(moved_at=10.0, now=190.0) == "no token for 180 s"


def test_the_same_bits_answer_alike() -> None:
    assert vllm_recovery.other_bits((-1.0, -2.0), (-1.00005, -2.0), "float32") == ""
    assert vllm_recovery.other_bits((), (), "float32") == ""
    assert "0.001" in vllm_recovery.other_bits((-1.0, -2.0), (-1.001, -2.0), "float32")
    assert vllm_recovery.other_bits((-1.0,), (-1.2,), "bfloat16") == ""
    assert vllm_recovery.other_bits((-1.0,), (math.nan,), "bfloat16") != ""
    assert "0 log-probs instead of 1" in vllm_recovery.other_bits((-1.0,), (), "float32")


def test_a_shape_is_read_from_a_config() -> None:
    """Without KV heads each head has its own; without a head size it is hidden / heads."""
    config = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_size": 32,
        "max_position_embeddings": 128,
        "vocab_size": 40,
    }
    assert vllm_fit.read_shape(config, 10) == vllm_fit.Shape(2, 4, 8, 128, 40, 10, 4)
    full = config | {"num_key_value_heads": 2, "head_dim": 16}
    assert vllm_fit.read_shape(full, 10) == vllm_fit.Shape(2, 2, 16, 128, 40, 10, 4)
    for broken in ({"hidden_size": 0}, {"hidden_size": True}, {"hidden_size": "32"}):
        with pytest.raises(ValueError, match=r"hidden_size in config\.json"):
            vllm_fit.read_shape(config | broken, 10)


def test_the_cache_of_one_token() -> None:
    """SmolLM2: 2 x 30 layers x 3 heads x 64 x 4 bytes; more cards than heads hold one each."""
    assert vllm_fit.token_bytes(SMOLLM2, dtype="float32", cards=1) == 46_080
    assert vllm_fit.token_bytes(QWEN3_4B, dtype="bfloat16", cards=4) == 2 * 36 * 2 * 128 * 2
    assert vllm_fit.token_bytes(QWEN3_4B, dtype="bfloat16", cards=16) == 2 * 36 * 1 * 128 * 2


def test_a_small_model_on_a_processor() -> None:
    """1 GiB of cache unless its owner chose: 23,301 tokens, the whole context; the words say so."""
    found = vllm_fit.fit(SMOLLM2, CPU)
    assert (found.max_model_len, found.kv_bytes) == (8192, 1 << 30)
    assert found.words == (
        "weights 0.50 GiB in float32, KV cache 1.00 GiB = 23301 tokens: 16 slots of 1456 tokens at once, context 8192 tokens"
    )


def test_a_model_on_a_card_takes_what_is_left() -> None:
    """24 GiB x 0.9 - 7.49 GiB - 1.5 GiB = 12.6 GiB; 147,456 bytes a token; vLLM is told no size."""
    found = vllm_fit.fit(QWEN3_4B, GPU)
    assert (found.max_model_len, found.kv_bytes) == (40960, None)
    assert "= 91" in found.words
    given_size = vllm_fit.fit(QWEN3_4B, replace(GPU, kv_bytes=4 << 30))
    assert given_size.kv_bytes == 4 << 30
    assert given_size.max_model_len == 29120
    assert "(of the model's 40960)" in given_size.words


def test_two_cards_share_the_weights() -> None:
    found = vllm_fit.fit(QWEN3_4B, replace(GPU, memory_bytes=12 << 30, cards=2))
    assert "3.75 GiB a card in bfloat16" in found.words


def test_ranks_on_a_processor_share_the_machine() -> None:
    """2 x (0.25 GiB + 1 GiB + 1.25 GiB) do not fit into 90 % of 5 GiB, though one of them does."""
    even = replace(SMOLLM2, heads=8)
    assert vllm_fit.fit(even, replace(CPU, memory_bytes=6 << 30, cards=2)).kv_bytes == 1 << 30
    with pytest.raises(ValueError, match=r"more than 90% of 2\.50 GiB"):
        vllm_fit.fit(even, replace(CPU, memory_bytes=5 << 30, cards=2))


def test_heads_are_not_cut() -> None:
    with pytest.raises(ValueError, match=r"--tensor-parallel 2: the model's 9 attention heads"):
        vllm_fit.fit(SMOLLM2, replace(CPU, cards=2))


def test_unknown_memory_is_left_to_the_server() -> None:
    """A given cache still bounds the context."""
    found = vllm_fit.fit(QWEN3_4B, replace(GPU, memory_bytes=None))
    assert (found.max_model_len, found.kv_bytes) == (40960, None)
    assert "not known" in found.words
    assert vllm_fit.fit(SMOLLM2, replace(CPU, memory_bytes=None, max_model_len=512)).max_model_len == 512


@pytest.mark.parametrize(
    ("shape", "room", "words"),
    [
        (QWEN3_4B, replace(GPU, memory_bytes=8 << 30), r"does not fit.*raise --gpu-memory, more cards with --tensor-parallel"),
        (QWEN3_4B, replace(GPU, max_model_len=50_000), r"--max-model-len 50000: the model has 40960 positions"),
        (QWEN3_4B, replace(GPU, kv_bytes=64 << 20, max_model_len=4096), r"4096 are needed.*lower --max-model-len.*--kv-cache-gib"),
        (SMOLLM2, replace(CPU, kv_bytes=1 << 20), r"22 tokens, 256 are needed"),
        (SMOLLM2, replace(CPU, memory_bytes=2 << 30), r"are more than 90% of 2.00 GiB: use --dtype bfloat16, or take a machine"),
    ],
)
def test_what_does_not_fit_is_told_with_a_way_out(shape: vllm_fit.Shape, room: vllm_fit.Room, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        vllm_fit.fit(shape, room)


def test_a_model_with_a_short_context_needs_no_more() -> None:
    tiny = replace(SMOLLM2, context=128)
    assert vllm_fit.fit(tiny, CPU).max_model_len == 128


@given(st.integers(1, 64), st.floats(0.1, 0.98), st.sampled_from(["bfloat16", "float32"]), st.integers(0, 20_000))
def test_what_fits_leaves_the_runtime_its_room(gib: int, share: float, dtype: str, wanted: int) -> None:
    """Weights, one whole context and the allowance never exceed the share of the card."""
    room = vllm_fit.Room("gpu", gib << 30, share, 1, dtype, 8, max_model_len=wanted or None)
    try:
        found = vllm_fit.fit(QWEN3_4B, room)
    except ValueError:
        return
    used = QWEN3_4B.file_bytes * vllm_fit.ELEMENT_BYTES[dtype] // 2 + found.max_model_len * vllm_fit.token_bytes(
        QWEN3_4B, dtype=dtype, cards=1
    )
    assert used + (3 << 29) <= gib * share * (1 << 30) + 1
