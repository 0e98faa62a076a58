"""What the job file says about a loss: its own fields and defaults, and refusals in words."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from coordinator.wire.job import LOSS_FIELDS, AlgorithmConfig, JobConfig, SamplingConfig

OTHER = {
    "tv_low": 0.3,
    "tv_high": 0.3,
    "drift_penalty": 0.5,
    "clip_low": 0.1,
    "clip_high": 0.3,
    "dual_clip": 3.0,
    "ratio_cap": 3.0,
    "ratio_floor": 0.25,
}


def job(**sections: Any) -> JobConfig:
    plain = {"name": "one", "model": "m", "environment": {"type": "digit_sort"}, "budget": {"steps": 1}}
    return JobConfig.model_validate(plain | sections)


@pytest.mark.parametrize("loss", LOSS_FIELDS)
@pytest.mark.parametrize("name", OTHER)
def test_a_loss_takes_its_own_fields_only(loss: str, name: str) -> None:
    if name in LOSS_FIELDS[loss]:
        assert getattr(AlgorithmConfig.model_validate({"loss": loss, name: OTHER[name]}), name) == OTHER[name]
        return
    with pytest.raises(ValidationError) as caught:
        AlgorithmConfig.model_validate({"loss": loss, name: OTHER[name]})
    words = f"algorithm.{name} is {OTHER[name]}, but loss '{loss}' does not use it (it uses {', '.join(LOSS_FIELDS[loss])})"
    assert words in str(caught.value)


@pytest.mark.parametrize("loss", LOSS_FIELDS)
def test_a_whole_job_is_read_back_as_it_was(loss: str) -> None:
    """From its row, where every field has a value; also after a setting of its own."""
    for given in ({}, {LOSS_FIELDS[loss][-1]: OTHER[LOSS_FIELDS[loss][-1]]}):
        before = job(algorithm={"loss": loss, **given})
        assert JobConfig.model_validate_json(before.model_dump_json()) == before


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("gspo", {"clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "sequence_mean"}),
        ("cispo", {"ratio_cap": 5.0, "aggregation": "token_mean"}),
        ("reinforce", {"ratio_floor": 0.5, "ratio_cap": 5.0}),
        ("dppo", {"ratio_cap": 2.0, "tv_low": 0.2, "tv_high": 0.2, "drift_penalty": 1e-3}),
    ],
)
def test_defaults_are_the_papers(loss: str, expected: dict[str, Any]) -> None:
    found = AlgorithmConfig.model_validate({"loss": loss})
    assert {name: getattr(found, name) for name in expected} == expected


def test_what_is_set_wins_over_the_papers_default() -> None:
    assert AlgorithmConfig(loss="gspo", aggregation="token_mean", clip_low=0.1).aggregation == "token_mean"


def test_an_unknown_loss_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValidationError, match="'dppo', 'ppo_clip', 'cispo', 'gspo', 'reinforce' or 'decoupled'"):
        AlgorithmConfig.model_validate({"loss": "grpo"})


def test_stale_data_without_correction_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"staleness.max is 2 with algorithm.correction 'none': .* set algorithm.correction"):
        job(algorithm={"correction": "none"}, staleness={"max": 2})
    assert job(algorithm={"correction": "none"}, staleness={"max": 0}).algorithm.correction == "none"


@pytest.mark.parametrize("name", ["top_p", "top_k", "min_p", "repetition_penalty", "logit_bias"])
def test_there_is_no_sampling_filter_in_training(name: str) -> None:
    """A filtered sampler's log-probs are of another distribution than the learner's."""
    assert set(SamplingConfig.model_fields) == {"max_new_tokens", "temperature"}
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        job(sampling={name: 0.9})


@pytest.mark.parametrize("loss", LOSS_FIELDS)
def test_a_whole_job_goes_through_strict_json_and_back(loss: str) -> None:
    """As a REST body does: what one coordinator shows, another one takes."""
    whole = job(algorithm={"loss": loss, "betas": [0.8, 0.9]})
    again = JobConfig.model_validate_json(whole.model_dump_json(), strict=True)
    assert again == whole
    assert again.algorithm.betas == (0.8, 0.9)
    with pytest.raises(ValidationError, match="betas"):
        JobConfig.model_validate_json(whole.model_dump_json().replace("[0.8,0.9]", '["0.8",0.9]'), strict=True)
