"""The fetch machine alone, on a virtual clock."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p.domain.fetching import Arrived, Event, Failed, Fetching, FetchLimits, Request, Tick
from p2p.domain.manifest import Piece
from p2p.errors import FetchFailed

LIMITS = FetchLimits(no_progress_s=30)


def some(number: int) -> list[Piece]:
    return [Piece(format(n, "064x"), 10 + n) for n in range(number)]


def machine(pieces: int, *sources: str, limits: FetchLimits = LIMITS, origins: tuple[str, ...] = ()) -> Fetching:
    return Fetching(some(pieces), sources, now=0, limits=limits, origins=origins)


def test_nothing_wanted_is_done_at_once() -> None:
    fetch = machine(0)
    assert fetch.done
    assert fetch.next_requests(0) == []
    assert fetch.next_deadline() is None


def test_no_source_fails_in_words() -> None:
    with pytest.raises(FetchFailed, match="there is no source"):
        machine(1).next_requests(0)


def test_the_window_opens_by_one_with_each_piece_up_to_its_limit() -> None:
    fetch = machine(50, "a")
    asked = fetch.next_requests(0)
    assert len(asked) == 1
    seen = []
    for step in range(6):
        fetch.handle(Arrived(asked.pop(0)), step)
        asked += fetch.next_requests(step)
        seen.append(len(asked))
    assert seen == [2, 3, 4, 4, 4, 4]


def test_a_failed_source_is_banned_and_another_takes_its_piece() -> None:
    fetch = machine(1, "a", "b")
    (first,) = fetch.next_requests(0)
    fetch.handle(Failed(first, "failed", "reset"), 1)
    (second,) = fetch.next_requests(1)
    assert {first.source, second.source} == {"a", "b"}
    assert fetch.handle(Arrived(second), 2) == []
    assert fetch.done
    assert fetch.handle(Arrived(first), 3) == []  # too late, harmless


def ban(fetch: Fetching, kind: str, now: float) -> float:
    """Fail the next request at `now`; how long the only source is left alone."""
    (request,) = fetch.next_requests(now)
    fetch.handle(Failed(request, kind, "x"), now)  # type: ignore[arg-type]
    assert fetch.next_requests(now) == []
    deadline = fetch.next_deadline()
    assert deadline is not None
    return deadline - now


def test_bans_double_and_are_forgotten_with_time() -> None:
    fetch = machine(1, "a", limits=FetchLimits(no_progress_s=1000))
    assert [ban(fetch, "failed", now) for now in (0, 2, 5)] == [1, 2, 4]
    assert ban(fetch, "failed", 5 + 60) == 2  # two of three strikes forgotten


def test_damaged_bytes_count_threefold_and_a_ban_has_an_end() -> None:
    fetch = machine(1, "a", limits=FetchLimits(no_progress_s=1000))
    assert ban(fetch, "corrupt", 0) == 4
    assert ban(fetch, "corrupt", 4) == 30
    assert ban(machine(1, "a", limits=FetchLimits(no_progress_s=2)), "corrupt", 0) == 0.5  # retried before the fetch ends


def test_requests_that_fail_together_are_one_incident() -> None:
    fetch = machine(20, "a")
    asked = fetch.next_requests(0)
    for now in range(3):
        fetch.handle(Arrived(asked.pop(0)), now)
        asked += fetch.next_requests(now)
    assert len(asked) == 4
    for request in asked:
        fetch.handle(Failed(request, "failed", "reset"), 10)
    assert fetch.next_requests(10.9) == []
    assert len(fetch.next_requests(11)) == 1  # one strike, window closed to one


def test_absent_is_no_fault_but_is_believed_for_a_while() -> None:
    fetch = machine(1, "a")
    (request,) = fetch.next_requests(0)
    fetch.handle(Failed(request, "absent", "not here"), 0)
    assert fetch.next_requests(1.9) == []
    assert fetch.next_deadline() == 2.0
    assert fetch.next_requests(2.0) == [request]


def test_an_absent_piece_is_asked_elsewhere_and_others_here() -> None:
    fetch = machine(3, "a")
    (request,) = fetch.next_requests(0)
    fetch.handle(Failed(request, "absent", "not here"), 0)
    (other,) = fetch.next_requests(0.5)
    assert other.piece != request.piece


def test_the_last_piece_is_asked_of_another_source_and_the_slower_copy_cancelled() -> None:
    fetch = machine(1, "a", "b")
    (slow,) = fetch.next_requests(0)
    assert fetch.next_requests(1.9) == []
    assert fetch.next_deadline() == 2.0
    (quick,) = fetch.next_requests(2.0)
    assert quick.source != slow.source
    assert fetch.handle(Arrived(quick), 3) == [slow]
    assert fetch.done


def test_a_failing_copy_leaves_the_other_running() -> None:
    fetch = machine(1, "a", "b")
    (slow,) = fetch.next_requests(0)
    (quick,) = fetch.next_requests(2.0)
    fetch.handle(Failed(quick, "failed", "x"), 3)
    fetch.handle(Failed(quick, "failed", "told twice"), 3)
    assert fetch.next_requests(3) == []
    assert fetch.handle(Arrived(slow), 4) == []


def test_an_old_request_is_given_up_when_others_bring_pieces() -> None:
    fetch = machine(2, "a", "b", limits=FetchLimits(no_progress_s=30, steal_after_s=100))
    hung, live = fetch.next_requests(0)
    fetch.handle(Arrived(live), 29)
    assert fetch.handle(Tick(), 29.5) == []
    assert fetch.handle(Tick(), 30) == [hung]
    (again,) = fetch.next_requests(30)
    assert again == Request(live.source, hung.piece)


def test_no_progress_ends_with_the_last_error_of_each_source() -> None:
    fetch = machine(3, "a", "b")
    one, _ = fetch.next_requests(0)
    fetch.handle(Failed(one, "failed", "certificate is another"), 5)
    with pytest.raises(FetchFailed, match=r"for 30 s, 3 are missing.*certificate is another.*no answer yet"):
        fetch.next_requests(30)


def test_an_origin_is_spared_while_a_peer_is_usable() -> None:
    fetch = machine(100, "origin", "peer", origins=("origin",))
    asked = fetch.next_requests(0)
    for now in range(5):
        for request in asked:
            fetch.handle(Arrived(request), now)
        asked = fetch.next_requests(now)
    assert Counter(request.source for request in asked) == {"peer": 4, "origin": 1}
    for request in asked:
        if request.source == "peer":
            fetch.handle(Failed(request, "failed", "gone"), 6)
    assert Counter(request.source for request in fetch.next_requests(6)) == {"origin": 3}


def test_receivers_ask_in_different_orders() -> None:
    def first(salt: str) -> Piece:
        return Fetching(some(50), ["a"], now=0, limits=LIMITS, salt=salt).next_requests(0)[0].piece

    assert len({first(str(salt)) for salt in range(10)}) > 5
    assert first("x") == first("x")


@dataclass
class World:
    """Sources that behave as drawn, around a machine: every promise of the machine is checked at every event."""

    behaviour: dict[str, list[tuple[str, float]]]  # source -> cycle of (answer kind or "hang", delay)
    fetch: Fetching
    limits: FetchLimits
    running: dict[Request, int] = field(default_factory=dict)
    queue: list[tuple[float, int, Event]] = field(default_factory=list)
    asked: Counter[str] = field(default_factory=Counter)
    serial: count = field(default_factory=count)  # type: ignore[type-arg]

    def ask(self, request: Request, now: float) -> None:
        assert request not in self.running, "the same piece is asked twice of one source"
        cycle = self.behaviour[request.source]
        kind, delay = cycle[self.asked[request.source] % len(cycle)]
        self.asked[request.source] += 1
        number = next(self.serial)
        self.running[request] = number
        in_flight = Counter(one.source for one in self.running)
        assert max(in_flight.values()) <= self.limits.window
        if kind != "hang":
            event = Arrived(request) if kind == "ok" else Failed(request, kind, kind)  # type: ignore[arg-type]
            heapq.heappush(self.queue, (now + delay, number, event))

    def cancel(self, requests: list[Request]) -> None:
        for request in requests:
            del self.running[request]

    def run(self) -> float:
        now = 0.0
        for _ in range(20_000):
            self.cancel(self.fetch.handle(Tick(), now))
            for request in self.fetch.next_requests(now):
                self.ask(request, now)
            deadline = self.fetch.next_deadline()
            if deadline is None:
                return now
            assert deadline > now, "the machine would make its driver spin"
            if self.queue and self.queue[0][0] <= deadline:
                now, number, event = heapq.heappop(self.queue)
                assert isinstance(event, Arrived | Failed)
                if self.running.get(event.request) == number:
                    del self.running[event.request]
                    self.cancel(self.fetch.handle(event, now))
            else:
                now = deadline
        raise AssertionError("the fetch neither ends nor fails")


answers = st.tuples(st.sampled_from(["ok", "absent", "failed", "corrupt", "hang"]), st.floats(0, 40))
bad_source = st.lists(answers, min_size=1, max_size=5)


@given(st.integers(1, 40), st.lists(bad_source, max_size=5), st.floats(0, 14), st.booleans(), st.integers(1, 6))
@settings(deadline=None, max_examples=150)
def test_completes_whenever_one_source_holds_all_and_answers(
    pieces: int, bad: list[list[tuple[str, float]]], delay: float, origin: bool, window: int
) -> None:
    limits = FetchLimits(no_progress_s=30, window=window)
    behaviour = {"good": [("ok", delay)], **{f"bad{n}": cycle for n, cycle in enumerate(bad)}}
    origins = ("good",) if origin else ()
    fetch = Fetching(some(pieces), sorted(behaviour), now=0, limits=limits, origins=origins)
    World(behaviour, fetch, limits).run()
    assert fetch.done


def outcome(world: World) -> str | None:
    """None if the fetch ended well, else its words."""
    try:
        world.run()
    except FetchFailed as error:
        return str(error)
    return None


@given(st.integers(1, 20), st.lists(bad_source, min_size=1, max_size=4))
@settings(deadline=None, max_examples=100)
def test_ends_one_way_or_the_other(pieces: int, sources: list[list[tuple[str, float]]]) -> None:
    behaviour = {f"s{n}": cycle for n, cycle in enumerate(sources)}
    fetch = Fetching(some(pieces), behaviour, now=0, limits=LIMITS)
    story = outcome(World(behaviour, fetch, LIMITS))
    assert fetch.done if story is None else all(name in story for name in behaviour)
