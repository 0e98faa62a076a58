"""What every engine promises, run against each."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.contract.engines.conftest import Pace
from worker_node.adapters.engine import Aborted, EngineCore, Finished, Output, Unmakeable, Weights
from worker_node.domain.generation import Completion, GenerationRequest
from worker_node.errors import EngineError

Make = Callable[[int], EngineCore]
Ask = Callable[..., GenerationRequest]
VOCAB = 40


def run(engine: EngineCore) -> list[Output]:
    outputs: list[Output] = []
    while engine.is_busy:
        outputs += engine.step()
    return outputs


def by_slot(outputs: list[Output]) -> dict[int, Completion]:
    return {out.key[1]: out.completion for out in outputs if isinstance(out, Finished)}


def same(one: Completion, other: Completion) -> bool:
    return np.array_equal(one.token_ids, other.token_ids) and np.allclose(one.logprobs, other.logprobs, atol=1e-4)


def test_completions_are_well_formed(make_engine: Make, published: list[Weights], ask: Ask) -> None:
    """Ids in vocabulary, equal lengths, finite log-probs <= 0, one version, stop reason that agrees with last token and cap."""
    engine = make_engine(4)
    engine.load(published[1])
    engine.admit([ask(slot, prompt=(4, 5, 6)[: 1 + slot % 3], max_new_tokens=1 + slot * 5) for slot in range(10)])
    done = by_slot(run(engine))
    assert sorted(done) == list(range(10))
    for slot, completion in done.items():
        cap = 1 + slot * 5
        assert 1 <= completion.length <= cap
        assert len(completion.logprobs) == len(completion.versions) == completion.length
        assert completion.token_ids.dtype == np.int32
        assert completion.logprobs.dtype == np.float32
        assert completion.versions.dtype == np.int32
        assert (completion.token_ids >= 0).all()
        assert (completion.token_ids < VOCAB).all()
        assert np.isfinite(completion.logprobs).all()
        assert (completion.logprobs <= 0).all()
        assert set(completion.versions.tolist()) == {1}
        assert (completion.stop_reason == "stop") == (completion.token_ids[-1] == 3)
        assert completion.stop_reason == "stop" or completion.length == cap
        assert 3 not in completion.token_ids[:-1]
        assert completion.generate_s >= 0
    assert engine.tokens == sum(completion.length for completion in done.values())
    engine.close()


def test_a_seed_gives_the_same_tokens_whatever_runs_beside_it(make_engine: Make, published: list[Weights], ask: Ask) -> None:
    """A slot that is leased again elsewhere is the same draw."""
    alone = make_engine(1)
    alone.load(published[0])
    alone.admit([ask(3, seed=77, prompt=(8, 9))])
    expected = by_slot(run(alone))[3]
    crowded = make_engine(3)
    crowded.load(published[0])
    crowded.admit([ask(slot, prompt=(1,) * (1 + slot), max_new_tokens=3 + slot) for slot in (0, 1, 2)])
    outputs = crowded.step()
    crowded.admit([ask(3, seed=77, prompt=(8, 9)), ask(4, prompt=(2, 2, 2, 2, 2))])
    done = by_slot(outputs + run(crowded))
    assert sorted(done) == [0, 1, 2, 3, 4]
    assert same(done[3], expected)


def test_other_seeds_give_other_tokens(make_engine: Make, published: list[Weights], ask: Ask) -> None:
    """Slots of one group differ."""
    engine = make_engine(16)
    engine.load(published[0])
    engine.admit([ask(slot, max_new_tokens=12, stop=()) for slot in range(16)])
    done = by_slot(run(engine))
    assert len({tuple(completion.token_ids.tolist()) for completion in done.values()}) == 16


def test_weights_change_between_steps_and_running_completions_go_on(
    make_engine: Make, published: list[Weights], ask: Ask, pace: Pace
) -> None:
    """on_update = keep: tokens carry all versions, contiguous and in order."""
    engine = make_engine(4)
    engine.load(published[0])
    engine.admit([ask(slot, max_new_tokens=pace.tokens, stop=()) for slot in range(4)])
    for _ in range(3):
        pace.advance(engine)
    assert engine.apply(published[1], abort_running=False).ended == []
    for _ in range(2):
        pace.advance(engine)
    assert engine.apply(published[2], abort_running=False).stall_s >= 0
    done = by_slot(run(engine))
    assert sorted(done) == [0, 1, 2, 3]
    for completion in done.values():
        versions = completion.versions.tolist()
        assert versions == sorted(versions)
        assert set(versions) == {0, 1, 2}
        assert len(versions) == pace.tokens
        if pace.lockstep:
            assert versions == [0] * 3 + [1] * 2 + [2] * 4


def test_weights_change_with_abort(make_engine: Make, published: list[Weights], ask: Ask, pace: Pace) -> None:
    """on_update = abort: running completions end as aborted; queued ones start under the new version."""
    engine = make_engine(2)
    engine.load(published[0])
    engine.admit([ask(slot, max_new_tokens=pace.tokens, stop=()) for slot in range(3)])
    pace.advance(engine)
    assert engine.apply(published[1], abort_running=True).ended == [Aborted(("lease", 0)), Aborted(("lease", 1))]
    done = by_slot(run(engine))
    assert {slot: set(completion.versions.tolist()) for slot, completion in done.items()} == {2: {1}}


def test_abort_stops_queued_and_running_and_no_others(make_engine: Make, published: list[Weights], ask: Ask, pace: Pace) -> None:
    """Batch mates of an aborted slot are what they would have been."""
    engine = make_engine(2)
    engine.load(published[0])
    engine.admit([ask(slot, prompt=(5,) * (slot + 1), max_new_tokens=pace.tokens, stop=()) for slot in range(4)])
    pace.advance(engine)
    assert set(engine.abort([("lease", 0), ("lease", 3), ("other", 1)])) == {Aborted(("lease", 0)), Aborted(("lease", 3))}
    done = by_slot(run(engine))
    assert sorted(done) == [1, 2]
    alone = make_engine(1)
    alone.load(published[0])
    alone.admit([ask(1, prompt=(5, 5), max_new_tokens=pace.tokens, stop=())])
    assert same(by_slot(run(alone))[1], done[1])


def test_the_canary_names_the_bits(make_engine: Make, published: list[Weights]) -> None:
    """One value per token from the second on; a function of the weights; the same after load and after apply."""
    ids = (3, 1, 4, 1, 5, 9)
    engine = make_engine(2)
    engine.load(published[0])
    first = engine.canary(ids)
    assert len(first) == 5
    assert all(np.isfinite(first))
    assert max(first) <= 0
    engine.apply(published[1], abort_running=False)
    second = engine.canary(ids)
    assert np.abs(np.subtract(first, second)).max() > 1e-3
    fresh = make_engine(2)
    fresh.load(published[1])
    assert np.allclose(fresh.canary(ids), second, atol=1e-6)
    assert engine.canary(ids[:1]) == ()


def test_a_canary_between_steps_disturbs_nothing(make_engine: Make, published: list[Weights], ask: Ask) -> None:
    """The canary runs while completions are under way."""
    quiet, probed = make_engine(2), make_engine(2)
    for engine in (quiet, probed):
        engine.load(published[0])
        engine.admit([ask(slot, max_new_tokens=8) for slot in range(2)])
    outputs = probed.step()
    probed.canary((1, 2, 3))
    expected = by_slot(run(quiet))
    done = by_slot(outputs + run(probed))
    assert all(same(done[slot], expected[slot]) for slot in expected)


def test_nothing_is_generated_without_weights(make_engine: Make, ask: Ask) -> None:
    """The first order must be load."""
    engine = make_engine(2)
    engine.admit([ask()])
    with pytest.raises(EngineError, match="load"):
        engine.step()
    with pytest.raises(EngineError, match="load"):
        engine.canary((1, 2))


def test_a_broken_directory_keeps_the_old_weights(make_engine: Make, published: list[Weights], tmp_path: object, ask: Ask) -> None:
    """A failed update says so and changes nothing."""
    engine = make_engine(2)
    engine.load(published[0])
    before = engine.canary((1, 2, 3, 4))
    with pytest.raises(EngineError) as caught:
        engine.apply(Weights(published[0].directory / "absent", 9, "0" * 64), abort_running=True)
    assert not caught.value.poisoned
    assert engine.canary((1, 2, 3, 4)) == before
    engine.admit([ask(0)])
    assert set(by_slot(run(engine))[0].versions.tolist()) == {0}


def test_a_failed_update_stops_nothing(make_engine: Make, published: list[Weights], ask: Ask, pace: Pace) -> None:
    """Also where it was to abort: what runs goes on with the old weights, and is told of."""
    engine = make_engine(2)
    engine.load(published[0])
    engine.admit([ask(slot, max_new_tokens=pace.tokens, stop=()) for slot in range(3)])
    pace.advance(engine)
    with pytest.raises(EngineError):
        engine.apply(Weights(published[0].directory / "absent", 9, "0" * 64), abort_running=True)
    done = by_slot(run(engine))
    assert {slot: set(completion.versions.tolist()) for slot, completion in done.items()} == {0: {0}, 1: {0}, 2: {0}}


def test_an_update_after_an_abort_finds_nothing_running(make_engine: Make, published: list[Weights], ask: Ask, pace: Pace) -> None:
    """The very next order: whatever of the aborted completions is still under way somewhere, new ones are made by new weights alone."""
    engine = make_engine(4)
    engine.load(published[0])
    engine.admit([ask(slot, max_new_tokens=pace.tokens, stop=()) for slot in range(4)])
    pace.advance(engine)
    assert len(engine.abort([("lease", slot) for slot in range(4)])) == 4
    assert engine.apply(published[1], abort_running=False).stall_s < 20  # no start of a server
    engine.admit([ask(5)])
    assert set(by_slot(run(engine))[5].versions.tolist()) == {1}


def test_more_requests_than_the_queue_holds_are_refused(make_engine: Make, published: list[Weights], ask: Ask) -> None:
    """The queue has a bound."""
    engine = make_engine(2)
    engine.load(published[0])
    with pytest.raises(EngineError, match="queued"):
        engine.admit([ask(0)] * 65_537)
    assert not engine.is_busy


def test_close_ends_everything(make_engine: Make, published: list[Weights], ask: Ask) -> None:
    """After close nothing is left to do."""
    engine = make_engine(2)
    engine.load(published[0])
    engine.admit([ask(slot) for slot in range(4)])
    engine.step()
    engine.close()
    assert not engine.is_busy


def test_unmakeable_is_its_own_outcome() -> None:
    """It is neither finished nor aborted (the engines' own tests make one each)."""
    assert Unmakeable(("lease", 1), "too long") != Aborted(("lease", 1))
