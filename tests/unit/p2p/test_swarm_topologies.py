"""The fixed trees that the swarm is compared with."""

from p2p.domain.swarm_events import (
    Added,
    Advertise,
    Announced,
    Arrived,
    Closed,
    Completed,
    GiveUp,
    Opened,
    Requested,
    Send,
    Sent,
    Tick,
    Uplink,
)
from p2p.domain.swarm_topologies import FixedTree, chain, star, star_children, tree, tree_children
from tests.factories_swarm import PIECE, of

MEMBERS = ("seeder", "p1", "p2", "p3", "p4")


def test_who_is_below_whom() -> None:
    assert [list(star_children(5, position)) for position in range(3)] == [[1, 2, 3, 4], [], []]
    assert [list(tree_children(5, position, 1)) for position in range(5)] == [[1], [2], [3], [4], []]
    assert [list(tree_children(6, position, 2)) for position in range(6)] == [[1, 2], [3, 4], [5], [], [], []]


def seeded(node: FixedTree, pieces: int) -> FixedTree:
    node.handle(Added((PIECE,) * pieces, held=True), 0.0)
    node.handle(Completed(), 0.0)
    return node


def test_a_star_sends_each_piece_to_everyone_in_turn() -> None:
    node = seeded(star(MEMBERS, "seeder", 0.0), 2)
    sends = [one for peer in MEMBERS[1:] for one in of(Send, node.handle(Opened(peer, 1e6, 0.0), 0.0))]
    while sends[-1:] and len(sends) < 9:
        more = of(Send, node.handle(Sent(sends[-1].peer, sends[-1].piece), 0.0))
        if not more:
            break
        sends += more
    assert [(one.peer, one.piece) for one in sends] == [(peer, piece) for piece in (0, 1) for peer in MEMBERS[1:]]
    assert node.complete
    assert node.next_deadline() is None


def test_a_link_of_a_chain_passes_on_what_arrives() -> None:
    node = chain(MEMBERS, "p2", 0.0)
    node.handle(Opened("p1", 1e6, 0.0), 0.0)
    node.handle(Opened("p3", 1e6, 0.0), 0.0)
    node.handle(Added((PIECE, PIECE)), 0.0)
    out = node.handle(Arrived("p1", 1), 0.0)
    assert of(Send, out) == [Send("p3", 1)]
    assert of(Advertise, out) == [Advertise(("p1", "p3"), 0b10, 0, False)]
    assert node.handle(Arrived("p1", 1), 0.0) == []
    assert of(Send, node.handle(Arrived("p1", 0), 0.0)) == []  # one upload at a time
    assert node.handle(Sent("p3", 1), 0.0) == [Send("p3", 0)]
    assert not node.complete
    node.handle(Completed(), 0.0)
    assert node.complete


def test_the_end_of_a_tree_sends_nothing() -> None:
    node = tree(MEMBERS, "p4", 2, 0.0)
    node.handle(Added((PIECE,)), 0.0)
    assert node.handle(Arrived("p1", 0), 0.0) == []
    assert node.handle(Requested("p1", 0), 0.0) == []  # nobody is answered


def test_uplinks_are_filled_with_other_children() -> None:
    node = seeded(star(MEMBERS, "seeder", 0.0), 1)
    for peer in MEMBERS[1:]:
        node.handle(Opened(peer, 1e6, 0.0), 0.0)
    assert of(Send, node.handle(Uplink(1e6, 0.99e6), 0.0)) == []
    assert of(Send, node.handle(Uplink(1e6, 0.5e6), 0.0)) == [Send("p2", 0)]


def test_what_a_child_announces_is_not_sent_and_what_a_lost_one_lacked_is_sent_again() -> None:
    node = seeded(chain(MEMBERS, "seeder", 0.0), 3)
    assert node.handle(Closed("p1"), 0.0) == []
    node.handle(Opened("p1", 1e6, 0.0), 0.0)
    node.handle(Announced("p1", 0b010, 0, 1e6), 0.0)
    node.handle(Announced("p3", 0b111, 0, 1e6), 0.0)
    assert node.handle(Sent("p1", 0), 0.0) == [Send("p1", 2)]
    assert node.handle(Sent("p9", 0), 0.0) == []
    node.handle(Closed("p1"), 0.0)
    assert of(Send, node.handle(Opened("p1", 1e6, 0.0), 0.0)) == [Send("p1", 0)]


def test_a_silent_parent_is_given_up_in_words() -> None:
    node = chain(MEMBERS, "p1", 0.0)
    node.handle(Added((PIECE, PIECE)), 0.0)
    assert node.next_deadline() == 30.0
    assert node.handle(Tick(), 29.0) == []
    assert node.handle(Tick(), 30.0) == [GiveUp("no piece for 30 s, 2 of 2 pieces missing; parent silent")]
    assert node.next_deadline() == 60.0
