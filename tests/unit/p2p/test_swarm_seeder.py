"""The sender's half: what a seeder pushes to whom, and whose request is answered first."""

from p2p.domain.swarm_events import (
    Abort,
    Added,
    Advertise,
    Arrived,
    Cancelled,
    Closed,
    Opened,
    Refuse,
    Requested,
    Send,
    Sent,
    Tick,
    Uplink,
)
from tests.factories_swarm import ALL, PIECE, Alone, of


def holder(*pieces: int) -> Alone:
    """A peer that holds some pieces."""
    node = Alone()
    for piece in pieces:
        node.tell(Arrived(None, piece))
    return node


def test_each_fresh_piece_is_pushed_once_and_in_order() -> None:
    seeder = Alone(is_seeder=True)
    sends = of(Send, seeder.open("a", "b"))
    assert len(sends) == 1  # one upload at a time
    sends += of(Send, seeder.tell(Sent(sends[0].peer, 0)))
    while len(sends) < 10:
        sends += of(Send, seeder.tell(Sent(sends[-1].peer, sends[-1].piece)))
    assert [send.piece for send in sends] == list(range(10))
    assert of(Send, seeder.tell(Sent(sends[-1].peer, 9))) == []


def test_pushes_follow_the_uplinks() -> None:
    seeder = Alone(pieces=66, is_seeder=True)
    sends = of(Send, seeder.tell(Opened("fast", 1e7, 0.0)))
    seeder.tell(Opened("slow", 1e6, 0.0))
    sends += of(Send, seeder.tell(Sent("fast", 0)))
    while len(sends) < 66:
        sends += of(Send, seeder.tell(Sent(sends[-1].peer, sends[-1].piece)))
    assert [send.peer for send in sends].count("slow") == 6  # 1 of 11


def test_who_passes_nothing_on_gets_no_more_than_its_backlog() -> None:
    """`b` passes every piece on at once, `a` none: what others report counts, not what was promised."""
    seeder = Alone(pieces=100, is_seeder=True)
    send = of(Send, seeder.open("a", "b", "c"))[0]
    given = {"a": 0, "b": 0, "c": 0}
    for _ in range(99):
        given[send.peer] += 1
        if send.peer != "a":
            seeder.hear("b" if send.peer == "c" else "c", 1 << send.piece)
        send = of(Send, seeder.tell(Sent(send.peer, send.piece)))[0]
    assert given["a"] == 1


def test_requests_wait_until_every_piece_was_pushed_and_that_is_said() -> None:
    seeder = Alone(pieces=2, is_seeder=True)
    out = seeder.open("a")
    assert of(Advertise, out)[0] == Advertise(("a",), 0b11, 0, False)
    assert seeder.tell(Requested("a", 1)) == []
    out = seeder.tell(Sent("a", 0))
    assert of(Send, out) == [Send("a", 1)]
    assert of(Advertise, out) == [Advertise(("a",), 0, 1, True)]


def test_a_seeder_that_encodes_pushes_what_is_added_before_it_answers() -> None:
    seeder = Alone(pieces=1, is_seeder=True, closed=False)
    seeder.open("a", "b")
    seeder.tell(Requested("b", 0))
    out = seeder.tell(Added((PIECE,), held=True))
    assert of(Advertise, out)[0].pieces == 0b10
    assert of(Send, seeder.tell(Sent("a", 0))) == [Send("b", 1)]
    assert of(Send, seeder.tell(Sent("b", 1))) == [Send("b", 0)]


def test_pieces_that_died_with_a_peer_are_fresh_again() -> None:
    seeder = Alone(pieces=4, is_seeder=True)
    seeder.open("a", "b")
    sends = [Send("a", 0), *of(Send, seeder.tell(Sent("a", 0)))]
    while len(sends) < 4:
        sends += of(Send, seeder.tell(Sent(sends[-1].peer, sends[-1].piece)))
    lost = [send.piece for send in sends if send.peer == "a"]
    assert lost == [0, 2]
    seeder.hear("b", 0b0001)  # piece 0 was passed on
    seeder.tell(Sent(sends[-1].peer, sends[-1].piece))
    out = seeder.tell(Closed("a"))
    assert of(Send, out) == [Send("b", 2)]
    assert of(Send, seeder.tell(Sent("b", 2))) == []


def test_a_seeder_that_returns_listens_before_it_pushes() -> None:
    seeder = Alone(pieces=3, is_seeder=True, returns=True)
    out = seeder.open("a", "b")
    assert of(Send, out) == []
    assert not of(Advertise, out)[0].serves
    seeder.hear("a", 0b011)
    assert of(Send, seeder.tell(Tick(), 0.5)) == []
    assert [send.piece for send in of(Send, seeder.tell(Tick(), 1.0))] == [2]


def test_a_peer_that_holds_pieces_already_is_not_given_them() -> None:
    seeder = Alone(pieces=3, is_seeder=True)
    seeder.hear("a", 0b111)
    seeder.open("a", "b")
    seeder.hear("a", 0b110)
    assert of(Send, seeder.tell(Sent("a", 0))) == []


def test_nobody_is_pushed_to_who_has_everything() -> None:
    seeder = Alone(pieces=2, is_seeder=True)
    seeder.open("a")
    seeder.hear("a", ALL)
    seeder.tell(Sent("a", 0))
    assert of(Send, seeder.open("b")) == []


def test_another_upload_begins_when_what_was_begun_should_have_left() -> None:
    """A piece takes 0.1 s of the uplink: who is still being served after it does not fill the uplink."""
    seeder = Alone(pieces=9, is_seeder=True)
    assert [send.peer for send in of(Send, seeder.open("a", "b"))] == ["a"]
    assert of(Send, seeder.tell(Tick(), 0.1)) == []
    assert [send.peer for send in of(Send, seeder.tell(Tick(), 0.11))] == ["b"]
    assert of(Send, seeder.tell(Tick(), 0.2)) == []
    assert of(Send, seeder.tell(Sent("b", 1), 0.205)) == []  # `a` is still at it, and there is no room for one more yet
    assert of(Send, seeder.tell(Uplink(2e6, 1.95e6))) == []
    assert [send.piece for send in of(Send, seeder.tell(Tick(), 0.22))] == [2]  # until 0.27 now: twice the uplink
    assert [send.piece for send in of(Send, seeder.tell(Tick(), 0.28))] == [3]


def test_a_measure_below_the_uplink_allows_one_upload_more() -> None:
    seeder = Alone(pieces=9, is_seeder=True)
    seeder.open("a", "b", "c")
    assert of(Send, seeder.tell(Uplink(1e6, 0.96e6))) == []
    assert [send.peer for send in of(Send, seeder.tell(Uplink(1e6, 0.5e6)))] == ["b"]
    assert [send.peer for send in of(Send, seeder.tell(Uplink(1e6, 0.94e6)))] == ["c"]


def test_what_fills_up_follows_the_uplinks_too() -> None:
    """A slow peer's push that drags on is no reason to give the other slow one more than its share."""
    seeder = Alone(pieces=30, is_seeder=True)
    sends = of(Send, seeder.tell(Opened("slow", 1e6, 0.0)))
    seeder.tell(Opened("other", 1e6, 0.0))
    seeder.tell(Opened("fast", 1e7, 0.0))
    for number in range(1, 14):
        sends += of(Send, seeder.tell(Tick(), 0.11 * number))
        if sends[-1].peer == "fast":
            seeder.tell(Sent("fast", sends[-1].piece))
    assert [send.peer for send in sends] == ["slow", *["fast"] * 9, "other", *["fast"] * 3]


def test_pushes_to_one_peer_at_once_are_limited() -> None:
    seeder = Alone(pieces=30, is_seeder=True)
    sends = of(Send, seeder.open("a"))
    for number in range(1, 20):
        sends += of(Send, seeder.tell(Tick(), 0.2 * number))
    assert len(sends) == 4


def test_a_request_fills_up_only_for_who_is_not_served_yet() -> None:
    node = holder(0, 1, 2)
    node.open("a", "b")
    sends = of(Send, node.tell(Requested("a", 0)))
    for peer, piece in (("a", 1), ("b", 2)):
        sends += of(Send, node.tell(Requested(peer, piece)))
    for number in range(1, 9):
        sends += of(Send, node.tell(Tick(), 0.2 * number))
    assert [(send.peer, send.piece) for send in sends] == [("a", 0), ("b", 2)]


def test_uploads_at_once_are_limited() -> None:
    seeder = Alone(pieces=30, is_seeder=True)
    sends = of(Send, seeder.open(*(f"p{n}" for n in range(12))))
    for number in range(1, 20):
        sends += of(Send, seeder.tell(Tick(), 0.2 * number))
    assert len(sends) == 8


def test_the_most_deprived_is_answered_first() -> None:
    node = holder(0, 1, 2)
    node.open("rich", "poor")
    node.open("seeder", is_seeder=True)
    node.hear("rich", 0b0011)
    node.hear("poor", 0b0100)
    node.tell(Requested("rich", 2))  # begins
    node.tell(Requested("rich", 2))  # again: nothing new
    node.open("third")
    node.hear("third", 0b0111)
    node.tell(Requested("poor", 1))
    node.tell(Requested("poor", 0))
    assert of(Send, node.tell(Sent("rich", 2))) == [Send("poor", 1, 0)]


def test_the_only_copy_goes_first_and_to_the_best_relay() -> None:
    node = holder(0, 1)
    node.open("slow", "busy")
    node.open("fast", uplink=1e7)
    node.hear("busy", 0b01)
    node.hear("fast", 0b1100, uplink=1e7)
    node.tell(Requested("slow", 0))  # begins
    for peer in ("slow", "fast"):
        node.tell(Requested(peer, 1))
    assert of(Send, node.tell(Sent("slow", 0))) == [Send("fast", 1, 0)]


def test_relays_alike_to_a_factor_two_are_served_by_need() -> None:
    node = holder(0, 1, 2)
    node.open("a", uplink=1.00e6)
    node.open("b", uplink=1.02e6)
    node.hear("b", 0b1000, uplink=1.02e6)
    node.tell(Requested("a", 0))
    node.tell(Requested("b", 1))
    node.tell(Requested("a", 2))
    assert of(Send, node.tell(Sent("a", 0))) == [Send("a", 2, 0)]


def test_the_flag_asks_for_a_window_that_covers_the_round_trip() -> None:
    """1 MB/s over 0.3 s is 3 pieces: fewer waiting is +1, more than 8 is -1."""
    flags = {}
    for waiting in (2, 3, 8, 9):
        node = holder(*range(10))
        node.open("a", rtt_s=0.3)
        node.tell(Requested("a", 0))
        node.open("b")
        for piece in range(waiting):
            node.tell(Requested("b", piece))
        node.tell(Requested("a", 1))
        node.hear("b", 0b11_0000_0000)
        flags[waiting] = of(Send, node.tell(Sent("a", 0)))[0].flag
    assert flags == {2: 1, 3: 0, 8: 0, 9: -1}


def test_what_is_not_held_or_too_much_is_refused() -> None:
    wide = Alone(pieces=40)
    for piece in range(30):
        wide.tell(Arrived(None, piece))
    wide.open("a")
    assert wide.tell(Requested("a", 35)) == [Refuse("a", 35)]
    answers = [wide.tell(Requested("a", piece)) for piece in range(18)]
    assert answers[0] == [Send("a", 0, 0)]
    assert answers[1:17] == [[]] * 16
    assert answers[17] == [Refuse("a", 17)]


def test_a_cancelled_request_is_dropped_or_its_upload_aborted() -> None:
    node = holder(0, 1)
    node.open("a")
    node.tell(Requested("a", 0))
    node.tell(Requested("a", 1))
    assert node.tell(Cancelled("a", 1)) == []
    assert node.tell(Cancelled("a", 0)) == [Abort("a", 0)]
    assert node.tell(Cancelled("a", 5)) == []
    assert of(Send, node.tell(Sent("a", 0))) == []


def test_reports_about_strangers_are_ignored() -> None:
    node = holder(0)
    node.open("a")
    for event in (Requested("x", 0), Cancelled("x", 0), Sent("x", 0), Closed("x")):
        assert node.tell(event) == []
    assert node.tell(Sent("a", 4)) == []
