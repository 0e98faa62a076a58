"""The structural ring: whole submissions, single completions, and the batch form."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from coordinator.domain.admission import check_completion, check_completions, check_lease, check_unneeded
from coordinator.domain.model import LeaseState


def refusal(lease, *, worker="w", epoch=3, fence=2, steps=7, now=50.0):
    return check_lease(
        lease,
        lease_id="l",
        worker_id=worker,
        session_epoch=epoch,
        fence=fence,
        committed_steps=steps,
        now=now,
    )


def test_a_live_lease_passes(make_lease) -> None:
    """Up to its last step and its deadline."""
    assert refusal(make_lease(), steps=7, now=100.0) is None


@pytest.mark.parametrize(
    ("row", "case", "code", "blame", "paid"),
    [
        ({}, {"worker": "x"}, "not_your_lease", "worker", False),
        ({}, {"epoch": 4}, "old_session", "worker", False),
        ({}, {"fence": 1}, "old_fence", "worker", False),
        ({}, {"now": 100.1}, "lease_expired", "worker", False),
        ({"state": LeaseState.EXPIRED}, {}, "lease_expired", "worker", False),
        ({}, {"steps": 8}, "lease_dead_by_version", "coordinator", True),
        ({}, {"steps": 8, "now": 101.0}, "lease_expired", "worker", False),
        ({"state": LeaseState.DEAD}, {}, "lease_dead_by_version", "coordinator", True),
        ({"state": LeaseState.DEAD}, {"now": 101.0}, "lease_expired", "worker", False),
        (
            {"state": LeaseState.DEAD, "reason": "policy_rolled_back: x"},
            {},
            "policy_rolled_back",
            "coordinator",
            True,
        ),
        ({"state": LeaseState.CANCELLED}, {}, "lease_closed", "job", True),
        ({"state": LeaseState.ABANDONED}, {}, "lease_closed", "network", False),
        ({"state": LeaseState.DONE}, {}, "lease_closed", "worker", False),
    ],
)
def test_refused_submissions(make_lease, row, case, code, blame, paid) -> None:
    """Each has its code, its blame and its pay; only work in time by the wall is paid."""
    refused = refusal(make_lease(**row), **case)
    assert refused is not None
    assert (refused.code, refused.blame, refused.paid) == (code, blame, paid)
    assert refused.reason


def test_a_lease_that_died_with_its_group_says_so(make_lease) -> None:
    """The stored reason is what the owner reads."""
    refused = refusal(make_lease(state=LeaseState.DEAD, reason="stale: group 4 is too old"))
    assert refused is not None
    assert refused.reason == "lease l is dead: stale: group 4 is too old"


def test_an_unknown_lease(make_lease) -> None:
    """Is named."""
    refused = refusal(None)
    assert refused is not None
    assert refused.code == "unknown_lease"
    assert "lease l" in refused.reason


def test_a_sound_completion_is_accepted(make_submitted, make_limits) -> None:
    """Stop token last, versions 5 to 6, all confirmed."""
    verdict = check_completion(make_submitted(versions=[5, 5, 6]), make_limits())
    assert (verdict.accepted, verdict.code, verdict.slot) == (True, "", 0)


def test_a_completion_at_the_cap_is_accepted(make_submitted, make_limits) -> None:
    """Four tokens, none of them a stop token."""
    assert check_completion(make_submitted(ids=(4, 5, 6, 7), stop_reason="length"), make_limits()).accepted


def test_a_one_token_completion_is_accepted(make_submitted, make_limits) -> None:
    """Just the stop token."""
    assert check_completion(make_submitted(ids=(2,)), make_limits()).accepted


WRONG = [
    ({"ids": (4, 10, 1)}, "outside_vocabulary", "token id 10"),
    ({"ids": (-1, 4, 1)}, "outside_vocabulary", "token id -1"),
    ({"logprobs": [-0.5, -0.5]}, "unequal_lengths", "2 log-probs"),
    ({"versions": [5, 5]}, "unequal_lengths", "2 versions"),
    ({"ids": ()}, "wrong_length", "0 tokens"),
    ({"ids": (4, 4, 4, 4, 1)}, "wrong_length", "1 to 4"),
    ({"logprobs": [-0.5, float("nan"), -0.5]}, "logprob_not_finite", "NaN"),
    ({"logprobs": [-0.5, float("-inf"), -0.5]}, "logprob_not_finite", "infinite"),
    ({"logprobs": [-0.5, float("inf"), -0.5]}, "logprob_not_finite", "infinite"),
    ({"logprobs": [-0.5, 0.25, -0.5]}, "logprob_positive", "0.25"),
    ({"logprobs": [-0.5, -3e38, -0.5]}, "logprob_impossible", "-3e+38"),
    ({"logprobs": [-0.5, -104.5, -0.5]}, "logprob_impossible", "-104.5"),
    ({"ids": (4, 5, 6)}, "wrong_stop", "last token 6"),
    ({"ids": (4, 1, 1)}, "wrong_stop", "place 1 of 3"),
    ({"ids": (2, 4, 1)}, "wrong_stop", "place 0 of 3"),
    ({"ids": (4, 5, 6), "stop_reason": "length"}, "wrong_stop", "after 3 tokens"),
    ({"ids": (4, 5, 6, 1), "stop_reason": "length"}, "wrong_stop", "send 'stop'"),
    ({"stop_reason": "abort"}, "wrong_stop", "'abort'"),
    ({"versions": [6, 5, 6]}, "versions_decrease", "fall"),
    ({"versions": [4, 5, 5]}, "outside_lease", "4..5"),
    ({"versions": [5, 5, 8]}, "outside_lease", "5..7"),
    ({"versions": [5, 5, 7]}, "version_not_claimed", "version 7"),
    ({"generate_s": 0.001}, "too_fast", "at least 0.003 s"),
    ({"generate_s": float("nan")}, "too_fast", "nan"),
]


def test_what_runs_on_into_newer_versions_is_late_and_no_fault(make_submitted, make_limits) -> None:
    """The lease serves steps 5 to 7. A slow worker's completion goes on while step 8 is committed: nobody's fault but time's."""
    known = dict.fromkeys(range(5, 9), "d" * 64)
    late = make_limits(claimed=known, confirmed=known, committed_steps=8)
    assert check_unneeded(make_submitted(versions=[5, 5, 8]), late) is None
    verdict = check_completion(make_submitted(versions=[5, 5, 8]), late)
    assert (verdict.code, verdict.blame, verdict.paid) == ("stale", "coordinator", True)
    early = make_limits(claimed=known, confirmed=known, committed_steps=7)
    refused = check_unneeded(make_submitted(versions=[5, 5, 8]), early)
    assert refused is not None
    assert refused.code == "outside_lease"


@pytest.mark.parametrize(("case", "code", "words"), WRONG)
def test_wrong_completions_are_the_workers_fault(make_submitted, make_limits, case, code, words) -> None:
    """Named by code, value and slot; not paid."""
    verdict = check_completion(make_submitted(slot=3, **case), make_limits())
    assert (verdict.accepted, verdict.code, verdict.blame, verdict.paid) == (False, code, "worker", False)
    assert verdict.reason.startswith("slot 3: ")
    assert words in verdict.reason


@pytest.mark.parametrize(("case", "code", "words"), WRONG)
def test_what_is_made_up_is_the_workers_fault_though_nobody_needs_it(make_submitted, make_limits, case, code, words) -> None:
    """Too old by a lowered bound, or (but for the shape) of lost bits: that would be paid if it were sound."""
    for limits in (make_limits(), make_limits(committed_steps=9)):
        is_late = limits.committed_steps == 9 and case.get("versions") == [5, 5, 8]  # newer than the lease, and of no known bits
        expected = "version_not_claimed" if is_late else code
        refused = check_unneeded(make_submitted(**case), limits)
        assert refused is not None
        assert (refused.code, refused.blame, refused.paid) == (expected, "worker", False)
        assert check_completion(make_submitted(**case), limits).code == expected


def test_sound_work_that_nobody_needs_is_no_fault(make_submitted, make_limits) -> None:
    """Too old, or made by bits that a replay replaced."""
    for limits in (make_limits(), make_limits(committed_steps=9), make_limits(rolled_back=frozenset({"d5"}))):
        assert check_unneeded(make_submitted(), limits) is None


def test_work_of_lost_bits_is_not_paid_when_it_came_impossibly_fast(make_submitted, make_limits) -> None:
    limits = make_limits(rolled_back=frozenset({"d5"}))
    assert check_completion(make_submitted(), limits).paid
    assert not check_completion(make_submitted(generate_s=0.001), limits).paid


@pytest.mark.parametrize("field", ["token_ids", "logprobs", "versions"])
@pytest.mark.parametrize("wrong", [np.zeros(3, np.float64), np.zeros((3, 1), np.int32), np.zeros((3, 1), np.float32)])
def test_wrong_types(make_submitted, make_limits, field, wrong) -> None:
    """Other dtypes and shapes are refused before anything is computed."""
    verdict = check_completion(replace(make_submitted(), **{field: wrong}), make_limits())
    assert verdict.code == "wrong_type"
    assert field in verdict.reason


def test_an_unconfirmed_version(make_submitted, make_limits) -> None:
    """Claimed but never proved by canary."""
    verdict = check_completion(make_submitted(versions=[5, 6, 6]), make_limits(confirmed={5: "d5"}))
    assert verdict.code == "version_not_confirmed"


def test_a_digest_that_was_not_confirmed(make_submitted, make_limits) -> None:
    """The identity of a version is number and digest."""
    verdict = check_completion(make_submitted(), make_limits(claimed={5: "other"}))
    assert verdict.code == "wrong_digest"
    assert "other" in verdict.reason


def test_a_rolled_back_digest_is_paid(make_submitted, make_limits) -> None:
    """The coordinator replaced the weights; the worker did its work."""
    verdict = check_completion(make_submitted(), make_limits(rolled_back=frozenset({"d5"})))
    assert (verdict.code, verdict.blame, verdict.paid) == ("policy_rolled_back", "coordinator", True)


def test_work_that_a_lowered_bound_made_useless_is_paid(make_submitted, make_limits) -> None:
    """Version 5 serves step 7 with S = 2; with S = 1 it does not."""
    assert check_completion(make_submitted(), make_limits(committed_steps=7)).accepted
    verdict = check_completion(make_submitted(), make_limits(committed_steps=7, bound=1))
    assert (verdict.code, verdict.blame, verdict.paid) == ("stale", "coordinator", True)


def test_a_job_without_stop_tokens(make_submitted, make_limits) -> None:
    """Everything runs to the cap."""
    limits = make_limits(stop_token_ids=())
    assert check_completion(make_submitted(ids=(1, 2, 3, 4), stop_reason="length"), limits).accepted
    assert check_completion(make_submitted(), limits).code == "wrong_stop"


def test_many_sound_completions(make_submitted, make_limits) -> None:
    """The quick path accepts what the single check accepts."""
    done = [
        make_submitted(slot=0),
        make_submitted(slot=1, ids=(4, 5, 6, 7), stop_reason="length"),
        make_submitted(slot=2, ids=(2,)),
    ]
    assert [(v.slot, v.accepted) for v in check_completions(done, make_limits())] == [(0, True), (1, True), (2, True)]
    assert check_completions([], make_limits()) == []


@pytest.mark.parametrize(("case", "code", "words"), WRONG)
def test_one_wrong_among_many(make_submitted, make_limits, case, code, words) -> None:
    """Only the wrong one is refused, with the words of the single check."""
    done = [make_submitted(slot=0), make_submitted(slot=3, **case), make_submitted(slot=4)]
    verdicts = check_completions(done, make_limits())
    assert [v.accepted for v in verdicts] == [True, False, True]
    assert verdicts[1] == check_completion(done[1], make_limits())


def test_mixed_versions_take_the_careful_path(make_submitted, make_limits) -> None:
    """Completions across a swap are judged one by one."""
    done = [make_submitted(slot=0), make_submitted(slot=1, versions=[5, 6, 6])]
    assert all(v.accepted for v in check_completions(done, make_limits()))


def test_swapped_stops_do_not_cancel_out(make_submitted, make_limits) -> None:
    """As many stop tokens as completions that stop, at the wrong ends."""
    done = [
        make_submitted(slot=0, ids=(4, 5, 6, 1), stop_reason="length"),
        make_submitted(slot=1, ids=(4, 5, 6, 7), stop_reason="stop"),
    ]
    assert [v.code for v in check_completions(done, make_limits())] == ["wrong_stop", "wrong_stop"]
