"""What a plan takes for true: given before measured before assumed, every default with its reason."""

from __future__ import annotations

import pytest

from coordinator.domain.plan_facts import KNOWN, Fact, PlanRefused, Source, settled_facts
from coordinator.wire.environment import EnvironmentConfig
from tests.unit.domain.plans import job


def test_given_before_measured_before_assumed() -> None:
    """And each says which it is."""
    measured = {"train_s": Fact(7.0, Source.MEASURED, "job j-1"), "grade_s": Fact(3.0, Source.MEASURED, "job j-1")}
    facts = settled_facts(job(), given={"train_s": 9.0}, measured=measured)
    assert set(facts.by_name) == set(KNOWN)
    assert (facts["train_s"], facts.by_name["train_s"].source) == (9.0, Source.GIVEN)
    assert (facts["grade_s"], facts.by_name["grade_s"].source) == (3.0, Source.MEASURED)
    assert facts.by_name["load_s"].source is Source.ASSUMED
    assert all(fact.why for fact in facts.by_name.values())


def test_defaults_by_hand() -> None:
    """An 8B model: 16 rollouts of 100 + 256 tokens, 8 FLOP a parameter and token, 400 TFLOP/s; 2 bytes a weight."""
    facts = settled_facts(job(), given={}, measured={})
    assert facts["parameters"] == 8e9
    assert facts["mean_tokens"] == 100
    assert facts["train_s"] == pytest.approx(8 * 8e9 * 16 * 356 / 400e12)
    assert facts["keyframe_bytes"] == pytest.approx(0.667 * 16e9)
    assert facts["delta_bytes"] == pytest.approx(61e6, rel=0.01)  # the field's figure for 8B at 1e-6
    assert facts["apply_s"] == pytest.approx(3.2)
    assert facts["completion_bytes_up"] == 800
    assert facts.generation_s == pytest.approx(100 / 40)


def test_several_turns_by_hand() -> None:
    """Three turns of five, half of 100 tokens sampled: the prompt of 256 goes out three times, and half of the record on average with two of them."""
    played = job().model_copy(update={"environment": EnvironmentConfig(type="guess_number", max_turns=5)})
    facts = settled_facts(played, given={"grade_s": 0.5}, measured={})
    assert (facts["turns"], facts["placed_share"]) == (3.0, 0.5)
    assert facts["completion_bytes_up"] == 8 * 50
    assert facts["completion_bytes_down"] == 4 * (3 * 256 + 100)
    assert facts.generation_s == pytest.approx(50 / 40)
    assert facts.looks_s == 1.5
    assert facts["train_s"] == settled_facts(job(), given={}, measured={})["train_s"], "the learner reads all tokens"
    alone = settled_facts(job(), given={"grade_s": 0.5}, measured={})
    assert (alone["turns"], alone["placed_share"], alone.looks_s) == (1.0, 0.0, 0.5)
    with pytest.raises(PlanRefused, match=r"turns is 6, above environment.max_turns 5"):
        settled_facts(played, given={"turns": 6.0}, measured={})


def test_a_delta_grows_with_steps_and_is_no_larger_than_a_keyframe() -> None:
    """8 steps: 8^0.68 = 4.11 times."""
    facts = settled_facts(job(), given={"delta_bytes": 100.0, "keyframe_bytes": 1000.0}, measured={})
    assert facts.delta_bytes(1) == 100
    assert facts.delta_bytes(8) == pytest.approx(411.2, abs=0.1)
    assert facts.delta_bytes(1000) == 1000


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("/models/Qwen2.5-0.5B-Instruct", 5e8),
        ("SmolLM2-135M", 1.35e8),
        ("models/llama 3 70b", 7e10),
        ("upload:abc4b5", 4e9),
        ("/models/mine", 4e9),
    ],
)
def test_sizes_out_of_names(name: str, parameters: float) -> None:
    """The last size that stands alone; else 4B."""
    assert settled_facts(job(model=name), given={}, measured={})["parameters"] == parameters


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"train_s": 0.0}, "train_s is 0 .given.: give s a step, above 0 to 1e.06"),
        ({"admitted": 1.5}, "admitted is 1.5"),
        ({"grade_s": float("nan")}, "grade_s is nan"),
        ({"no_signal": -0.1}, "no_signal is -0.1 .given.: give .* from 0 to 0.999"),
        ({"speed": 1.0}, "no assumption 'speed'"),
        ({"mean_tokens": 201.0}, "mean_tokens is 201, above sampling.max_new_tokens 200"),
    ],
)
def test_figures_that_cannot_be(given: dict[str, float], words: str) -> None:
    """Refused with name, value and what it may be."""
    with pytest.raises(PlanRefused, match=words):
        settled_facts(job(), given=given, measured={})


def test_a_default_stays_within_what_is_allowed() -> None:
    """One token at most: half of it would be none."""
    assert settled_facts(job(max_new_tokens=1), given={}, measured={})["mean_tokens"] == 1
