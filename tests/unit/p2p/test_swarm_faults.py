"""What ends what makes no progress, and what liars can cost."""

from dataclasses import replace

import pytest

from p2p.domain.swarm_events import (
    Added,
    Advertise,
    Announced,
    Arrived,
    Began,
    Cancel,
    Cancelled,
    Closed,
    Completed,
    Drop,
    Failed,
    GiveUp,
    Instruction,
    Opened,
    Refuse,
    Request,
    Requested,
    Send,
    Sent,
    Tick,
)
from p2p.domain.swarm_limits import SwarmLimits
from tests.factories_swarm import ALL, PIECE, Alone, of


def pass_time(node: Alone, seconds: float, *talkers: str) -> list[Instruction]:
    """Ticks every 100 ms, during which `talkers` give signs of life."""
    out: list[Instruction] = []
    for _ in range(round(seconds * 10)):
        node.now += 0.1
        for peer in talkers:
            out += node.hear(peer)
        out += node.tell(Tick())
    return out


def test_wrong_bytes_end_the_connection_and_are_remembered() -> None:
    node = Alone(pieces=2)
    node.open("liar", "a")
    node.hear("liar", 1)
    node.hear("a", 1)
    out = node.tell(Failed("liar", 0, "corrupt"))
    assert of(Drop, out) == [Drop("liar", "piece 0 came with other bytes", 4.0)]
    assert of(Request, out) == [Request("a", 0)]
    assert node.tell(Closed("liar")) == []
    assert of(Drop, node.tell(Opened("liar", 1e6, 0.0), 3.9))[0].until == 4.0
    assert of(Advertise, node.tell(Opened("liar", 1e6, 0.0), 4.0)) != []
    assert of(Drop, node.tell(Failed("liar", 0, "corrupt")))[0].until == 4.0 + 7.5


def test_silence_is_death() -> None:
    node = Alone(pieces=1)
    node.open("mute", "a")
    node.hear("mute", 1)
    assert of(Drop, pass_time(node, 2.8, "a")) == []
    assert of(Drop, pass_time(node, 0.3, "a"))[0].peer == "mute"
    out = node.hear("a", 1)
    assert of(Request, out) == [Request("a", 0)]


def test_silence_is_fine_once_everybody_has_everything() -> None:
    node = Alone(pieces=1, is_seeder=True)
    node.open("a")
    assert node.policy.next_deadline() is not None
    node.hear("a", 1)
    assert node.policy.next_deadline() is None
    assert of(Drop, node.tell(Tick(), 50.0)) == []


def test_a_node_that_was_asleep_blames_nobody() -> None:
    node = Alone(pieces=1)
    node.open("a")
    node.hear("a", 1)
    assert [one for one in node.tell(Tick(), 100.0) if isinstance(one, Drop | GiveUp)] == []
    assert of(Drop, pass_time(node, 2.8)) == []
    assert of(Drop, pass_time(node, 0.3))[0].peer == "a"


def test_the_clock_never_runs_back() -> None:
    node = Alone(pieces=1)
    node.open("a")
    node.tell(Tick(), 50.0)
    deadline = node.policy.next_deadline()
    node.tell(Tick(), 10.0)
    assert node.policy.next_deadline() == deadline


def test_who_is_asked_and_brings_nothing_is_left_alone_for_a_while() -> None:
    node = Alone(pieces=1)
    node.open("idle")
    node.hear("idle", 1)
    out = pass_time(node, 8.1, "idle")
    assert of(Cancel, out) == [Cancel("idle", 0)]
    assert of(Request, pass_time(node, 0.8, "idle")) == []
    assert of(Request, pass_time(node, 0.3, "idle")) == [Request("idle", 0)]
    assert of(Drop, out) == []


def test_bytes_that_keep_coming_are_progress() -> None:
    node = Alone(pieces=1)
    node.open("slow")
    node.hear("slow", 1)
    out = []
    for left in range(90_000, 60_000, -1_000):
        out += pass_time(node, 0.5, "slow")
        out += node.tell(Began("slow", 0, left, 2e3))
    assert of(Cancel, out) == []
    out = [one for _ in range(30) for one in [*pass_time(node, 0.5, "slow"), *node.tell(Began("slow", 0, left, 2e3))]]
    assert of(Cancel, out) != []  # nothing came: it only says so


def test_a_stuck_push_is_asked_for_elsewhere() -> None:
    node = Alone(pieces=1)
    node.open("seeder", is_seeder=True)
    node.open("a")
    node.tell(Began("seeder", 0, PIECE, 1e6))
    node.hear("a", 1)
    out = pass_time(node, 3.0, "seeder", "a")
    assert of(Cancel, out) == [Cancel("seeder", 0)]
    assert of(Request, out) == [Request("a", 0)]


def test_giving_up_names_what_is_missing_and_who_holds_it() -> None:
    node = Alone(pieces=3)
    node.open("a")
    node.hear("a", 0b010)
    node.tell(Arrived("a", 1))
    out = pass_time(node, 30.1, "a")
    assert of(GiveUp, out) == [GiveUp("no piece for 30 s, 2 of 3 pieces missing; a: holds 1, 0 asked")]


def test_giving_up_alone_and_in_the_middle_of_a_row() -> None:
    node = Alone(pieces=2, closed=False)
    node.tell(Arrived(None, 0))
    node.tell(Arrived(None, 1))
    out = pass_time(node, 30.1)
    assert of(GiveUp, out) == [GiveUp("no piece for 30 s, 2 pieces here, the row goes on; no neighbour is connected")]
    assert of(GiveUp, pass_time(node, 29.0)) == []
    node.tell(Added((PIECE,)))
    assert of(GiveUp, pass_time(node, 29.0)) == []


def test_a_seeder_waits_for_its_encoder() -> None:
    seeder = Alone(pieces=1, is_seeder=True, closed=False)
    assert of(GiveUp, pass_time(seeder, 60.0)) == []


@pytest.mark.parametrize("closed", [True, False])
def test_pieces_beyond_the_row_are_a_lie(closed: bool) -> None:
    node = Alone(pieces=3, closed=closed)
    node.open("liar")
    beyond = 1 << (3 if closed else SwarmLimits().pieces)
    assert of(Drop, node.tell(Announced("liar", beyond, 0, 1e6)))[0].reason == "announces pieces that are not in the row"


def test_claims_are_checked_when_the_row_ends() -> None:
    node = Alone(pieces=3, closed=False)
    node.open("liar", "a")
    node.hear("liar", 0b1000)
    node.hear("a", 0b0100)
    assert [one.peer for one in of(Drop, node.tell(Completed()))] == ["liar"]


def test_asking_for_what_one_has_ends_in_a_drop() -> None:
    node = Alone(pieces=1)
    node.tell(Arrived(None, 0))
    node.open("liar")
    node.hear("liar", 1)
    answers = [node.tell(Requested("liar", 0)) for _ in range(4)]
    assert answers[:3] == [[Refuse("liar", 0)]] * 3
    assert [type(one) for one in answers[3]] == [Drop]


def test_requests_without_end_end_in_a_drop() -> None:
    node = Alone(pieces=1)
    node.tell(Arrived(None, 0))
    node.open("greedy")
    out = []
    for _ in range(80):
        out += node.tell(Requested("greedy", 0))
        out += node.tell(Sent("greedy", 0))
    assert len(of(Send, out)) == 69  # 64 and four for each piece of the row
    assert len(of(Drop, out)) == 1


def test_a_storm_of_cancels_ends_in_a_drop() -> None:
    node = Alone(pieces=1)
    node.open("storm")
    out = [one for _ in range(100) for one in node.tell(Cancelled("storm", 0))]
    assert len(of(Drop, out)) == 1


def test_refusing_everything_is_as_bad_as_bringing_nothing() -> None:
    node = Alone(pieces=40)
    node.open("a")
    node.hear("a", ALL)
    out = [one for piece in range(16) for one in node.tell(Failed("a", piece, "absent"))]
    assert of(Cancel, out) != []
    assert of(Request, node.tell(Tick(), 0.9)) == []
    assert of(Drop, out) == []


def test_who_does_not_read_is_let_go() -> None:
    node = Alone(pieces=1, is_seeder=True)
    node.open("stuck")
    assert of(Drop, pass_time(node, 29.5, "stuck")) == []
    assert of(Drop, pass_time(node, 1.0, "stuck"))[0].reason == "does not take a piece in 30 s"


def test_a_sign_of_life_comes_every_second_and_a_changed_queue_is_told_sooner() -> None:
    node = Alone(pieces=3)
    node.tell(Arrived(None, 0))
    node.tell(Arrived(None, 1))
    node.open("a", "done")
    node.hear("done", ALL)
    assert len(of(Advertise, pass_time(node, 3.5, "a", "done"))) == 3
    node.tell(Requested("a", 0))
    node.tell(Requested("done", 2))
    node.tell(Requested("a", 1))  # waits: `a` is being served
    out = of(Advertise, pass_time(node, 0.3, "a", "done"))
    assert [one.queue for one in out] == [1]


def test_no_sign_of_life_for_who_needs_none() -> None:
    node = Alone(pieces=1, is_seeder=True)
    node.open("done", "a")
    node.hear("done", 1)
    assert {one.peers for one in of(Advertise, pass_time(node, 2.0, "done", "a"))} == {("a",)}


@pytest.mark.parametrize("uplink", [0.0, -1.0, float("nan"), float("inf"), 1e30])
def test_absurd_uplinks_are_not_believed(uplink: float) -> None:
    seeder = Alone(pieces=30, is_seeder=True)
    seeder.open("liar", uplink=uplink)
    seeder.open("a")
    sends = of(Send, seeder.hear("liar", 0, uplink=uplink))
    for piece in range(29):
        sends += of(Send, seeder.tell(Sent("liar", piece)) + seeder.tell(Sent("a", piece)))
    assert len(sends) == 29


def test_a_peer_that_connects_again_begins_anew() -> None:
    node = Alone(pieces=1)
    node.open("a")
    node.hear("a", 1)
    assert of(Request, node.open("a")) == []
    assert of(Request, node.hear("a", 1)) == [Request("a", 0)]


def test_limits_can_be_set() -> None:
    node = Alone(pieces=1, limits=replace(SwarmLimits(), no_progress_s=1.0, stall_s=9.0))
    assert of(GiveUp, node.tell(Tick(), 1.0))[0].reason.startswith("no piece for 1 s, 1 of 1 pieces missing")
