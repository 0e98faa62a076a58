"""The middle of a bulk node: transfers, links, policies. Events go in, instructions come out and are performed on the links.

One lock guards all of it; nothing that waits is done under it. The loop's thread calls in with what it read and when something is due,
the owner with what it wants. The owner's events leave by the clerk's queue, so that no callback runs under the lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from p2p.adapters.bulk.adverts import Adverts, Speech
from p2p.adapters.bulk.events import GaveUp, NodeEvent, PeerClosed, PeerDropped, PeerOpened, TransferComplete
from p2p.adapters.bulk.link import Heard, Link
from p2p.adapters.bulk.outbox import Upload
from p2p.adapters.bulk.recent import Recent
from p2p.adapters.bulk.settings import BulkSettings
from p2p.adapters.bulk.throttle import Throttle
from p2p.adapters.bulk.transfer import Transfer
from p2p.domain import bulk_frames as frames
from p2p.domain.batches import Batch
from p2p.domain.swarm_events import (
    Abort,
    Added,
    Advertise,
    Announced,
    Arrived,
    Cancel,
    Closed,
    Completed,
    Drop,
    Event,
    GiveUp,
    Instruction,
    Opened,
    Policy,
    Refuse,
    Request,
    Send,
    Sent,
    Tick,
)

IDLE_S = 1.0
LEAST_S = 0.001  # a policy whose deadline is over is not asked more often


class Hub:
    """See the module. Methods that say so want the lock held; the others take it."""

    def __init__(
        self,
        settings: BulkSettings,
        throttle: Throttle,
        emit: Callable[[NodeEvent], None],
        make_policy: Callable[[Batch, float, float], Policy],
    ) -> None:
        """`make_policy(first batch, uplink, now)`."""
        self.settings = settings
        self.throttle = throttle
        self.emit = emit
        self.make_policy = make_policy
        self.lock = threading.Lock()
        self.adverts = Adverts()
        self.recent = Recent()
        self.due = 0.0  # when `tick` is to be called (time.monotonic)
        self.transfers: dict[str, Transfer] = {}
        self.links: dict[tuple[str, str], Link] = {}  # by job and peer
        self.buffers_left = settings.limits.buffer_bytes
        self.uplink = settings.uplink
        self.pace = settings.uplink  # sizes what is sent at once: the uplink, or what left just now if that was more
        self.was_idle = True  # nothing was waiting to be sent at some moment since this was last set to False
        self.is_closing = False
        self.wake: Callable[[], None] = lambda: None  # the loop's thread, if it waits: something is due sooner
        self._shut: dict[str, float] = {}

    # --- links

    def refusal(self, peer: str, job_id: str, dialled_here: bool) -> str | None:
        """Why a connection with `peer` is not wanted now; None if it is. The lock is held.

        Of two connections between the same two, the one dialled by the smaller id stays; of two dialled by the same, the newer.
        """
        if self.is_closing:
            return "this peer goes away"
        if peer == self.settings.peer_id:
            return "a peer does not connect to itself"
        if self._shut.get(peer, 0.0) > time.monotonic():
            return f"{peer} broke the protocol before; not before {self.settings.limits.shut_s:g} s have passed"
        other = self.links.get((job_id, peer))
        if other is None or other.closing is not None or other.dialled_here == dialled_here:
            return None
        dialler = self.settings.peer_id if dialled_here else peer
        if dialler == min(self.settings.peer_id, peer):
            return None
        return "there is a connection already, dialled from the other end"

    def admits(self, link: Link) -> str | None:
        """`refusal`, for a handshake that is not over."""
        with self.lock:
            return self.refusal(link.peer, link.job_id, link.dialled_here)

    def open(self, link: Link) -> str | None:
        """A connection passed its handshake; None, or why it is not taken after all."""
        with self.lock:
            refusal = self.refusal(link.peer, link.job_id, link.dialled_here)
            if refusal is not None:
                return refusal
            other = self.links.get((link.job_id, link.peer))
            if other is not None:
                other.close("a newer connection takes the place of this one")
                self._detach(other)
            self.links[link.job_id, link.peer] = link
        self.emit(PeerOpened(link.peer, link.job_id, link.dialled_here))
        return None

    def close(self, link: Link, reason: str, at_fault: bool) -> None:
        """A connection ended. `at_fault`: the peer broke the protocol, and is not let in for a while."""
        with self.lock:
            if at_fault:
                self._shut[link.peer] = time.monotonic() + self.settings.limits.shut_s
            self._detach(link)
        self.emit(PeerClosed(link.peer, link.job_id, reason))

    def _detach(self, link: Link) -> None:
        if link.arriving is not None:
            self.drop_buffer(link)
        if self.links.get((link.job_id, link.peer)) is not link:
            return
        del self.links[link.job_id, link.peer]
        for transfer in list(self.transfers.values()):
            self.leave(transfer, link.peer)

    def drop_buffer(self, link: Link) -> None:
        """Nothing arrives on the link any more. The lock is held."""
        arriving, link.arriving = link.arriving, None
        if arriving is not None and arriving.buffer is not None:
            self.buffers_left += arriving.size

    def take_buffer(self, size: int) -> bytearray:
        """Room for a piece. The lock is held."""
        self.buffers_left -= size
        return self.recent.take(size)

    # --- who takes part in what; the lock is held

    def join(self, transfer: Transfer, link: Link) -> None:
        """Tell the policy of a peer, unless it knows it or shut it out."""
        if link.peer in transfer.members or link.job_id != transfer.job_id or transfer.halted is not None:
            return
        if transfer.shut.get(link.peer, 0.0) > time.monotonic():
            return
        transfer.members[link.peer] = link
        self.feed(transfer, Opened(link.peer, link.uplink, link.rtt_s, link.is_seeder))
        heard = link.haves.get(transfer.id)
        if heard is not None and link.peer in transfer.members:
            self.feed(transfer, announced(link.peer, heard))

    def leave(self, transfer: Transfer, peer: str) -> None:
        """Tell the policy that a peer is gone."""
        if transfer.members.pop(peer, None) is not None:
            self.feed(transfer, Closed(peer))

    def is_pusher(self, link: Link) -> bool:
        """Whether pieces and batches are taken from the peer unasked."""
        return link.is_seeder or self.settings.takes_any_push

    def tell(self, transfer: Transfer, link: Link, flag: int) -> None:
        """Say how many batches are known here."""
        payload = bytes.fromhex(transfer.id)
        link.say(frames.frame(frames.KNOWS, payload, transfer=link.number(transfer.id), flag=flag, a=transfer.chain.next_number))

    def teach(self, transfer: Transfer, link: Link, until: int) -> None:
        """Send the batches that the peer lacks of those before number `until`."""
        since = link.known.get(transfer.id, 0)
        documents = transfer.chain.documents(since)[: max(until - since, 0)]
        for text, signature in documents:
            link.say(frames.batch(link.number(transfer.id), text, signature))
        link.known[transfer.id] = since + len(documents)

    def begin_again(self, transfer: Transfer) -> None:
        """A new policy, told what is held now: the disk lost a piece, which no policy can be told."""
        links = list(transfer.members.values())
        transfer.members.clear()
        for link in links:
            self._part(transfer, link)
        transfer.is_reported = False
        transfer.policy = self.make_policy(transfer.first, self.uplink, time.monotonic())
        if transfer.pieces:
            self.feed(transfer, Added(tuple(piece.size for piece in transfer.pieces)))
        for index in range(len(transfer.pieces)):
            if transfer.holds(index):
                self.feed(transfer, Arrived(None, index))
        if transfer.is_row_whole:
            self.feed(transfer, Completed())
        for link in links:
            self.join(transfer, link)

    # --- the policies; the lock is held

    def feed(self, transfer: Transfer, event: Event) -> None:
        """Give an event to a transfer's policy, perform what it answers, and so on until it is content."""
        policy = transfer.policy
        now = time.monotonic()
        due: list[Event] = []
        for instruction in policy.handle(event, now):
            self._perform(transfer, instruction, due)
        while due:
            for instruction in policy.handle(due.pop(0), now):
                self._perform(transfer, instruction, due)
        self.report(transfer)
        deadline = policy.next_deadline()
        if deadline is not None and deadline < self.due:
            self.due = deadline
        self.wake()

    def report(self, transfer: Transfer) -> None:
        """Tell the owner once everything is in the store."""
        if not transfer.is_reported and not transfer.unwritten and transfer.is_complete:
            transfer.is_reported = True
            self.emit(TransferComplete(transfer.id))

    def feed_all(self, event: Event) -> None:
        """The same event for every transfer."""
        for transfer in list(self.transfers.values()):
            self.feed(transfer, event)

    def has_uploads(self) -> bool:
        """Whether a piece is on its way out. The lock is held."""
        return any(link.outbox.uploads or link.is_leaving for link in self.links.values())

    def _perform(self, transfer: Transfer, instruction: Instruction, due: list[Event]) -> None:
        """Do what a policy says; what it is to hear of that goes to `due`."""
        if isinstance(instruction, Advertise):
            self.adverts.note(transfer, instruction)
            return
        if isinstance(instruction, GiveUp):
            self.emit(GaveUp(transfer.id, instruction.reason))
            return
        link = transfer.members.get(instruction.peer)
        if isinstance(instruction, Drop):
            self._drop(transfer, instruction, link)
            return
        if link is None:
            return  # it closed while the policy was thinking
        key = (transfer.id, instruction.piece)
        match instruction:
            case Send():
                self._send(transfer, link, instruction, due)
            case Abort():
                if link.outbox.abort(key) is not None:
                    link.aborted(key)
                    due.append(Sent(link.peer, instruction.piece))
            case Refuse():
                link.refuse(key)
            case Request():
                link.request(key)
            case Cancel():
                link.cancel(key)

    def _send(self, transfer: Transfer, link: Link, send: Send, due: list[Event]) -> None:
        key = (transfer.id, send.piece)
        if self.throttle.is_spent():
            link.refuse(key)
            due.append(Sent(link.peer, send.piece))
            return
        if transfer.first_sent_at is None:
            transfer.first_sent_at = self.settings.unix()
        if key not in link.owed:
            self.teach(transfer, link, transfer.batch_of(send.piece) + 1)
        piece = transfer.pieces[send.piece]
        link.outbox.uploads.append(Upload(transfer.id, send.piece, piece, link.number(transfer.id), send.flag))
        link.wake()

    def _drop(self, transfer: Transfer, drop: Drop, link: Link | None) -> None:
        """The policy counts the peer as closed already. What it still owes may come; what is owed to it does not."""
        now = time.monotonic()
        transfer.members.pop(drop.peer, None)
        transfer.shut[drop.peer] = drop.until
        self.emit(PeerDropped(transfer.id, drop.peer, drop.reason, drop.until - now))
        if link is not None:
            self._part(transfer, link)

    def _part(self, transfer: Transfer, link: Link) -> None:
        """Take back what was asked of a peer, and give nothing more of what it asked for. Its last words are still to come."""
        for key in [key for key in link.wanted if key[0] == transfer.id]:
            link.cancel(key)
        for upload in link.outbox.forget(transfer.id):
            link.aborted(upload.key)
        for key in [key for key in link.owed if key[0] == transfer.id]:
            link.refuse(key)

    # --- time

    def speech(self) -> Speech:
        """What adverts say of this node."""
        return Speech(self.uplink, not self.throttle.is_spent())

    def let_ride(self, link: Link) -> None:
        """What is new goes with a part, for nothing. The lock is held."""
        if self.adverts.due < float("inf"):
            for frame in self.adverts.ride(self.transfers.values(), link, self.speech()):
                link.outbox.say(frame)

    def advertise(self, now: float) -> None:
        """Tell what is new."""
        with self.lock:
            self.adverts.tell(self.transfers.values(), self.speech(), now)

    def tick(self, now: float) -> None:
        """Perform what is due; `due` says when to come again."""
        with self.lock:
            self.due = now + IDLE_S
            for transfer in list(self.transfers.values()):
                due = self._tick(transfer, now)
                self.due = min(self.due, due)
            if self._shut:
                self._shut = {peer: until for peer, until in self._shut.items() if until > now}

    def _tick(self, transfer: Transfer, now: float) -> float:
        for peer in [peer for peer, until in transfer.shut.items() if until <= now]:
            del transfer.shut[peer]
            link = self.links.get((transfer.job_id, peer))
            if link is not None:
                self.join(transfer, link)
        deadline = transfer.policy.next_deadline()
        if deadline is not None and deadline <= now and transfer.halted is None:
            self.feed(transfer, Tick())
            deadline = transfer.policy.next_deadline()
        due = min(transfer.shut.values(), default=float("inf"))
        return due if deadline is None or transfer.halted is not None else min(due, max(deadline, now + LEAST_S))


def announced(peer: str, heard: Heard) -> Announced:
    """The event that tells a policy all that a peer announced so far."""
    return Announced(peer, heard.pieces, heard.queue, heard.uplink, heard.serves)
