"""The receiver's half: what is asked of whom, windows, and what is moved to whom."""

from p2p.domain.swarm_events import (
    Added,
    Advertise,
    Announced,
    Arrived,
    Began,
    Cancel,
    Closed,
    Completed,
    Downlink,
    Failed,
    Request,
    Send,
    Sent,
    Tick,
)
from tests.factories_swarm import ALL, PIECE, Alone, of


def asked(peer: str, window: int, pieces: int = 40, rtt_s: float = 0.0) -> tuple[Alone, list[int]]:
    """A node that has asked `peer`, whose window was brought to `window`."""
    node = Alone(pieces=pieces)
    node.open(peer, rtt_s=rtt_s)
    open_asks = [one.piece for one in of(Request, node.hear(peer, ALL))]
    while len(open_asks) < window:
        piece = open_asks.pop(0)
        open_asks += [one.piece for one in of(Request, node.tell(Arrived(peer, piece, 1)))]
    return node, open_asks


def test_a_window_begins_with_its_share_of_the_round_trip() -> None:
    for rtt_s, neighbours, window in ((0.0, 1, 1), (0.3, 1, 4), (0.3, 2, 3), (10.0, 1, 16)):
        node = Alone(pieces=40)
        node.open(*(f"p{n}" for n in range(neighbours)), rtt_s=rtt_s)
        assert len(of(Request, node.hear("p0", ALL))) == window


def test_the_flag_moves_the_window_between_one_and_sixteen() -> None:
    node, asks = asked("a", 16, pieces=80)
    assert len(asks) == 16
    for _ in range(3):
        asks += [one.piece for one in of(Request, node.tell(Arrived("a", asks.pop(0), 1)))]
    assert len(asks) == 16
    for _ in range(20):
        asks += [one.piece for one in of(Request, node.tell(Arrived("a", asks.pop(0), -1)))]
    assert len(asks) == 1


def test_the_rarest_piece_is_asked_first() -> None:
    node = Alone(pieces=3)
    node.open("a", "b")
    node.hear("b", 0b011, serves=False)
    node.open("seeder", is_seeder=True)
    node.hear("seeder", ALL, serves=False)  # counts for all pieces alike
    assert of(Request, node.hear("a", ALL)) == [Request("a", 2)]


def test_nothing_is_asked_of_who_does_not_serve() -> None:
    node = Alone()
    node.open("seeder", is_seeder=True)
    assert node.hear("seeder", ALL, serves=False) == []
    assert len(of(Request, node.hear("seeder", serves=True))) == 1


def test_what_arrives_is_announced_to_all_and_passed_on() -> None:
    node = Alone(pieces=2)
    node.open("a", "b")
    node.hear("a", 0b01)
    out = node.tell(Arrived("a", 0))
    assert of(Advertise, out) == [Advertise(("a", "b"), 0b01, 0, True)]
    assert node.tell(Arrived("a", 0)) == []  # nothing new
    assert node.policy.held == 0b01
    assert not node.policy.complete
    node.tell(Arrived(None, 1))
    assert node.policy.complete


def test_a_row_that_grows_is_asked_for_as_it_grows() -> None:
    node = Alone(pieces=1, closed=False)
    node.open("a")
    assert of(Request, node.tell(Announced("a", 0b110, 0, 1e6))) == []  # its row is ahead of what is known here
    assert len(of(Request, node.tell(Added((PIECE, PIECE))))) == 1
    node.tell(Arrived("a", 1))
    node.tell(Arrived("a", 2))
    node.tell(Arrived("a", 0))
    assert not node.policy.complete
    node.tell(Completed())
    assert node.policy.complete


def test_a_piece_outside_the_row_is_ignored() -> None:
    node = Alone(pieces=1, closed=False)
    assert node.tell(Arrived(None, 1)) == []
    assert node.policy.held == 0


def slow_and_fast(queue: int, rtt_s: float = 0.0) -> tuple[Alone, int]:
    """A node that asked `slow`, whose queue is long, for its last piece; `fast` holds it too, and is told of after."""
    node = Alone(pieces=1)
    node.open("slow", "fast", rtt_s=rtt_s)
    piece = of(Request, node.hear("slow", 1, queue=queue))[0].piece
    node.hear("fast", 1)
    return node, piece


def test_a_request_moves_to_who_brings_it_much_sooner() -> None:
    node, piece = slow_and_fast(queue=4)  # 0.5 s there, 0.1 s here
    assert of(Request, node.tell(Tick(), 0.05)) == []  # too young
    assert node.tell(Tick(), 0.2) == [Cancel("slow", piece), Request("fast", piece)]


def test_a_small_gain_moves_nothing() -> None:
    node, _ = slow_and_fast(queue=0)
    assert of(Request, node.tell(Tick(), 0.15)) == []
    node, _ = slow_and_fast(queue=4, rtt_s=0.3)  # 0.5 s there; 1.5 * (0.1 + 0.3) + 0.15 here
    assert of(Request, node.tell(Tick(), 0.45)) == []


def test_a_piece_does_not_wander_between_two_that_promise_too_much() -> None:
    """Both say 1 MB/s and send 50 kB/s: wherever the piece is, it would be sooner elsewhere."""
    node = Alone(pieces=1)
    node.open("a", "b")
    holder = of(Request, node.hear("a", 1) + node.hear("b", 1))[-1].peer
    moves = 0
    for tick in range(1, 100):
        node.hear("a", 0)
        node.hear("b", 0)
        node.tell(Began(holder, 0, PIECE, 5e4), tick / 10)
        for moved in of(Request, node.tell(Tick())):
            holder = moved.peer
            moves += 1
    assert moves <= 7  # after 0.1, 0.2, 0.4, ... s


def test_what_has_begun_is_judged_by_what_is_left() -> None:
    node, piece = slow_and_fast(queue=4)
    node.tell(Began("slow", piece, left=50_000, rate=1e6), 0.1)  # 0.05 s
    assert of(Request, node.tell(Tick(), 0.11)) == []
    node, piece = slow_and_fast(queue=0)
    node.tell(Began("slow", piece, left=90_000, rate=1e5), 0.1)  # 0.9 s
    assert of(Request, node.tell(Tick(), 0.15)) == [Request("fast", piece)]


def test_the_longest_wait_is_moved_first() -> None:
    node = Alone(pieces=3)
    node.open("slow", "slower", "third", "fast")
    node.hear("slow", 0b001, queue=5)
    node.hear("slower", 0b010, queue=9)
    node.hear("third", 0b100, queue=7)
    node.hear("fast", 0b111)
    assert of(Request, node.tell(Tick(), 0.15)) == [Request("fast", 1)]


def test_what_comes_later_than_promised_is_moved() -> None:
    """A holder that advertises the best figures and sends nothing is not believed for ever."""
    node, piece = slow_and_fast(queue=0)
    node.hear("slow", 0, uplink=1e9)
    for tenths in range(1, 21):
        assert of(Request, node.tell(Tick(), tenths / 10)) == []
        node.hear("slow", 0, uplink=1e9)
        node.hear("fast", 0)
    assert of(Request, node.tell(Tick(), 2.5)) == [Request("fast", piece)]


def test_a_full_downlink_moves_nothing() -> None:
    node, piece = slow_and_fast(queue=9)
    node.tell(Downlink(True))
    assert of(Request, node.tell(Tick(), 0.15)) == []
    node.tell(Downlink(False))
    assert of(Request, node.tell(Tick(), 0.3)) == [Request("fast", piece)]


def test_a_moved_piece_that_comes_anyway_is_cancelled_where_it_was_moved_to() -> None:
    node, piece = slow_and_fast(queue=4)
    node.tell(Tick(), 0.15)
    assert of(Cancel, node.tell(Arrived("slow", piece))) == [Cancel("fast", piece)]


def test_a_push_is_not_asked_for_elsewhere() -> None:
    node = Alone(pieces=1)
    node.open("seeder", is_seeder=True)
    node.open("a")
    node.tell(Began("seeder", 0, PIECE, 1e6))
    assert of(Request, node.hear("a", 1)) == []
    node.tell(Closed("seeder"))
    assert of(Request, node.tell(Tick(), 0.1)) == []  # asked already: at once when the seeder was gone
    node.tell(Arrived("a", 0))
    assert node.policy.complete


def test_pushes_are_believed_of_a_seeder_only() -> None:
    node = Alone(pieces=1)
    node.open("liar", "a")
    for event in (Began("liar", 0, PIECE, 1e6), Began("stranger", 0, PIECE, 1e6), Began("a", 7, PIECE, 1e6)):
        node.tell(event)
    assert of(Request, node.hear("a", 1)) == [Request("a", 0)]
    node.tell(Began("liar", 0, PIECE, 1e6))  # asked elsewhere
    assert of(Cancel, node.tell(Arrived("liar", 0))) == [Cancel("a", 0)]


def test_what_a_lost_peer_was_asked_for_is_asked_of_others_at_once() -> None:
    node = Alone(pieces=1)
    node.open("a", "b")
    node.hear("a", 1)
    node.hear("b", 1)
    assert of(Request, node.tell(Closed("a"))) == [Request("b", 0)]


def test_a_refusal_is_believed_for_a_while_and_asked_of_others() -> None:
    node = Alone(pieces=1)
    node.open("a", "b")
    node.hear("a", 1)
    node.hear("b", 1)
    assert of(Request, node.tell(Failed("a", 0, "absent"))) == [Request("b", 0)]
    assert of(Request, node.tell(Failed("b", 0, "absent"))) == []
    assert of(Request, node.tell(Tick(), 1.9)) == []
    assert of(Request, node.tell(Tick(), 2.1)) != []


def test_a_piece_that_arrives_is_sent_on_when_asked_for() -> None:
    node = Alone(pieces=2)
    node.open("a", "b")
    node.tell(Arrived("a", 0))
    assert node.policy.next_deadline() is not None
    node.tell(Sent("a", 0))
    assert of(Send, node.hear("b", 0)) == []
