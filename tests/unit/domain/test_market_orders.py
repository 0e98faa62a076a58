"""Quotes follow the verdict; between two quotes of a worker there is no moment without one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.domain.capacity_inputs import Estimate
from coordinator.domain.market import Bidder, Verdict
from coordinator.domain.market_orders import RATED_S, TIMED_S, Orders, made, orders, timed
from coordinator.domain.model import QuoteRow
from pricing.throughput import Throughput

NOW = 1_000.0


def bidder(name: str = "w", *, price: int = 360_000, rate: float = 100.0) -> Bidder:
    return Bidder(name, name, "o", price, 8, Throughput(5.0, NOW), Estimate(1.0), 0.9, tokens_per_s=rate)


def verdict(*active: str, timed_: tuple[str, ...] = (), standby: dict[str, str] | None = None) -> Verdict:
    return Verdict(dict.fromkeys(active, "chosen"), frozenset(timed_), standby or {}, 8.0, 9.0, 0.1, "why")


def quote(name: str = "w", *, per_million: int | None = 1_000_000, price: int = 360_000, at: float = NOW - 60) -> QuoteRow:
    row = timed("j", name, 1, price, "", at)
    return replace(row, uusd_per_million_tokens=per_million, expires_at=at + (TIMED_S if per_million is None else RATED_S))


def run(one: Bidder, said: Verdict, *open_quotes: QuoteRow, gone: dict[str, tuple[float, str]] | None = None) -> Orders:
    return orders("j", [one], said, open_quotes, gone or {}, NOW)


def test_who_becomes_active_is_quoted_by_its_rate() -> None:
    """0.36 USD an hour at 100 tokens a second are 1 USD per million."""
    done = run(bidder(), verdict("w"))
    assert not done.ended
    (row,) = done.opened
    assert (row.uusd_per_million_tokens, row.uusd_per_idle_hour, row.made_at, row.expires_at) == (
        1_000_000,
        360_000,
        NOW,
        NOW + RATED_S,
    )
    assert (row.role, row.reason, row.ended_at) == ("active", "chosen", None)


@pytest.mark.parametrize(("rate", "said"), [(100.0, verdict("w", timed_=("w",))), (0.0, verdict("w"))])
def test_without_a_rate_it_is_quoted_by_time(rate: float, said: Verdict) -> None:
    (row,) = run(bidder(rate=rate), said).opened
    assert (row.uusd_per_million_tokens, row.expires_at) == (None, NOW + TIMED_S)


def test_a_quote_that_holds_is_left_alone() -> None:
    assert run(bidder(), verdict("w"), quote()).is_empty
    assert run(bidder(rate=0.0), verdict("w"), quote(per_million=None, at=NOW - 5)).is_empty
    assert run(bidder(), verdict("w", timed_=("w",)), quote(per_million=None, at=NOW - 5)).is_empty
    assert run(bidder(price=0), verdict("w"), quote(per_million=0, price=0)).is_empty


def test_who_is_not_needed_any_more_is_told_why() -> None:
    (row,) = run(bidder(), verdict(standby={"w": "too dear"}), quote()).ended
    assert (row.ended_at, row.ended_because) == (NOW, "too dear")
    (row,) = run(bidder(), verdict(), quote()).ended
    assert row.ended_because == "why"


@pytest.mark.parametrize(
    ("one", "before", "why"),
    [
        (bidder(price=500_000), quote(), "its price moved from 0.3600 to 0.5000 USD/h"),
        (bidder(), quote(at=NOW - RATED_S + 5), "the last quote expires"),
        (bidder(), quote(per_million=None, at=NOW - 5), "its rate is measured"),
        (bidder(rate=130.0), quote(), "its rate moved from 100.0 to 130.0 tokens/s"),
        (bidder(rate=70.0), quote(), "its rate moved from 100.0 to 70.0 tokens/s"),
    ],
)
def test_a_quote_is_made_anew_without_a_gap(one: Bidder, before: QuoteRow, why: str) -> None:
    done = run(one, verdict("w"), before)
    (old,), (new,) = done.ended, done.opened
    assert old.ended_because == f"quoted anew: {why}"
    assert old.ended_at == new.made_at == NOW
    assert new.uusd_per_idle_hour == one.uusd_per_hour


def test_a_rate_that_moved_a_little_or_just_now_changes_nothing() -> None:
    assert run(bidder(rate=115.0), verdict("w"), quote()).is_empty
    assert run(bidder(rate=50.0), verdict("w"), quote(at=NOW - 29)).is_empty
    assert run(bidder(rate=200.0), verdict("w"), quote(at=NOW - 4)).is_empty


def test_a_rate_that_rose_is_quoted_anew_sooner_than_one_that_fell() -> None:
    """Each token is paid too much until then."""
    assert len(run(bidder(rate=200.0), verdict("w"), quote(at=NOW - 5)).opened) == 1
    assert len(run(bidder(rate=50.0), verdict("w"), quote(at=NOW - 30)).opened) == 1


def test_a_session_that_ended_ends_its_quote_then() -> None:
    old = quote()
    done = run(bidder(), verdict("w"), old, gone={old.id: (NOW - 20, "its session ended")})
    assert [(row.ended_at, row.ended_because) for row in done.ended] == [(NOW - 20, "its session ended")]
    assert len(done.opened) == 1
    early = run(bidder(), verdict("w"), old, gone={old.id: (0.0, "its session ended")})
    assert early.ended[0].ended_at == old.made_at
    (stranger,) = run(bidder(), verdict(), quote("x")).ended
    assert (stranger.ended_at, stranger.ended_because) == (NOW, "it may not serve the job any more")


def test_of_two_open_quotes_the_older_one_stays() -> None:
    first, second = quote(at=NOW - 60), quote(at=NOW - 50)
    (row,) = run(bidder(), verdict("w"), second, first).ended
    assert row.id == second.id


def test_ids_name_worker_session_and_moment() -> None:
    assert made("j", replace(bidder(), session_epoch=3), "r", NOW, is_timed=True).id == "j/w/3/1000.000000"
