"""Batches between peers: who knows how much of a transfer's row, who asks whom for the rest, and what is believed.

What a seeder's owner gave goes to every peer at once. Others only say how many batches they know; who lacks some asks one peer at a
time. Nothing is believed or passed on before its signature and its place in the chain were checked.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass

from p2p.adapters.bulk.events import BatchSeen
from p2p.adapters.bulk.hub import Hub
from p2p.adapters.bulk.link import Link
from p2p.adapters.bulk.transfer import Transfer
from p2p.adapters.piece_store import PieceStore
from p2p.domain import bulk_frames as frames
from p2p.domain.batches import Batch, Chain, text_hash
from p2p.domain.manifest import Piece
from p2p.domain.swarm_events import Added, Arrived, Completed
from p2p.errors import BatchRefused, FrameRefused

ASK_S = 2.0  # then another peer is asked
ANSWERED = 16  # batches in one answer
MOST_ANSWERS = 1 << 20  # bytes that may wait on a link before an ASK is let fall
DECLINED = 4096
MOST_ASKS = 64  # transfers whose batches one peer is asked for at a time
MOST_UNANSWERED = 3  # asks for a transfer; then the peer is not asked for it again until it knows more or brings some
MOST_PROMISED = 256  # transfers unknown here that a peer is believed to know; a job has about 150 at a time


@dataclass(slots=True)
class _Asked:
    """Batches up to number `until` are to come from `link`; `since` when it was asked or last brought one."""

    link: Link
    until: int
    since: float


class Catalogue:
    """The hub's part that deals in batches."""

    def __init__(self, hub: Hub, store: PieceStore) -> None:
        self._hub = hub
        self._store = store
        self._asking: dict[str, _Asked] = {}
        self._declined: OrderedDict[str, None] = OrderedDict()  # transfers that the owner does not want, or retired

    # --- the owner's side

    def add(self, text: str, signature: str) -> str:
        """A batch from the owner; the transfer's id. Raises BatchRefused."""
        batch = Batch.from_json(text)
        hub = self._hub
        with hub.lock:
            transfer = self._owners(batch, text)
            if transfer is None:
                transfer = self._begin(text_hash(text), text, signature, None)
            else:
                self._accept(transfer, text, signature, None)
            for link in list(hub.links.values()):
                if link.job_id == transfer.job_id:
                    self._offer(transfer, link)
            return transfer.id

    def want(self, transfer: str) -> None:
        """Take part in a transfer that was declined before, when a peer offers it."""
        hub = self._hub
        with hub.lock:
            self._declined.pop(transfer, None)
            for link in list(hub.links.values()):
                if transfer in link.promised:
                    self._inquire(transfer, link)

    def retire(self, transfer_id: str) -> None:
        """Take no part in a transfer any more; its pieces stay in the store."""
        hub = self._hub
        with hub.lock:
            self._decline(transfer_id)
            transfer = hub.transfers.pop(transfer_id, None)
            self._settle(transfer_id)
            for link in list(hub.links.values()):
                link.forget(transfer_id)
                if link.arriving is not None and link.arriving.transfer == transfer_id:
                    hub.drop_buffer(link)
                if transfer is not None and link.job_id == transfer.job_id:
                    link.say(frames.frame(frames.FORGET, bytes.fromhex(transfer_id)))
            if transfer is not None:
                self._store.forget(transfer.places)

    # --- links

    def greet(self, link: Link) -> None:
        """Name every transfer of the job to a new peer."""
        hub = self._hub
        with hub.lock:
            for transfer in list(hub.transfers.values()):
                if transfer.job_id == link.job_id:
                    self._tell(transfer, link)

    def take(self, link: Link, head: frames.Head, payload: bytearray) -> None:
        """A KNOWS, ASK, BATCH or FORGET frame. Raises FrameRefused."""
        hub = self._hub
        if head.kind == frames.BATCH:
            self._batch(link, head, payload)
            return
        transfer_id = bytes(payload).hex()
        with hub.lock:
            if head.kind == frames.KNOWS:
                self._knows(link, head, transfer_id)
            elif head.kind == frames.ASK:
                self._answer(link, transfer_id, head.a)
            else:
                self._forgotten(link, transfer_id)

    def tick(self, now: float) -> None:
        """Ask others for batches that did not come."""
        hub = self._hub
        with hub.lock:
            for transfer_id, asked in list(self._asking.items()):
                link = asked.link
                is_here = hub.links.get((link.job_id, link.peer)) is link
                if is_here and now - asked.since < ASK_S:
                    continue
                self._settle(transfer_id)
                if link.taught_at < asked.since:
                    link.unanswered[transfer_id] = link.unanswered.get(transfer_id, 0) + 1
                others = [other for other in hub.links.values() if transfer_id in other.promised and other is not link]
                for other in [*others, link] if is_here else others:
                    self._inquire(transfer_id, other)
            for link in hub.links.values():
                self._ask_more(link)

    # --- the lock is held from here on, but for `_batch`

    def _knows(self, link: Link, head: frames.Head, transfer_id: str) -> None:
        link.name(head.transfer, transfer_id)
        if not self._may_promise(link, transfer_id):
            return
        if head.a > link.promised.get(transfer_id, 0):
            link.unanswered.pop(transfer_id, None)
        link.promised[transfer_id] = head.a
        link.known[transfer_id] = max(head.a, link.known.get(transfer_id, 0))
        if transfer_id in self._declined:
            link.say(frames.frame(frames.FORGET, bytes.fromhex(transfer_id)))
            return
        transfer = self._hub.transfers.get(transfer_id)
        if transfer is not None and transfer.job_id == link.job_id:
            self._hub.join(transfer, link)
        if head.flag & frames.FOLLOWS and self._hub.is_pusher(link):
            self._expect(transfer_id, link, head.a)
        self._inquire(transfer_id, link)

    def _may_promise(self, link: Link, transfer_id: str) -> bool:
        """Whether the peer's word on a transfer is kept: one that is known here, or one of not too many others."""
        transfers = self._hub.transfers
        if link.is_seeder or transfer_id in transfers or transfer_id in link.promised:
            return True
        return sum(one not in transfers for one in link.promised) < MOST_PROMISED

    def _inquire(self, transfer_id: str, link: Link) -> None:
        """Ask the peer for batches that it knows and this node does not, unless another is asked already."""
        transfer = self._hub.transfers.get(transfer_id)
        known = 0 if transfer is None else transfer.chain.next_number
        if link.promised.get(transfer_id, 0) <= known or transfer_id in self._asking or transfer_id in self._declined:
            return
        if link.unanswered.get(transfer_id, 0) >= MOST_UNANSWERED:
            return
        if self._expect(transfer_id, link, min(link.promised[transfer_id], known + ANSWERED)):
            link.say(frames.frame(frames.ASK, bytes.fromhex(transfer_id), a=known))

    def _expect(self, transfer_id: str, link: Link, until: int) -> bool:
        """Batches up to number `until` are to come from the peer; False if others are to come already, or too many from this peer."""
        if transfer_id in self._asking:
            return False
        if link.asks >= MOST_ASKS:
            link.is_kept_waiting = True
            return False
        self._asking[transfer_id] = _Asked(link, until, time.monotonic())
        link.asks += 1
        link.inquired.add(transfer_id)
        return True

    def _settle(self, transfer_id: str) -> None:
        """Nothing more is to come."""
        asked = self._asking.pop(transfer_id, None)
        if asked is not None:
            asked.link.asks -= 1

    def _ask_more(self, link: Link) -> None:
        """Ask the peer for what waited until it had answered others."""
        if not link.is_kept_waiting or link.asks >= MOST_ASKS:
            return
        link.is_kept_waiting = False
        for transfer_id in list(link.promised):
            self._inquire(transfer_id, link)

    def _answer(self, link: Link, transfer_id: str, since: int) -> None:
        transfer = self._hub.transfers.get(transfer_id)
        if transfer is None or transfer.job_id != link.job_id or link.outbox.control_bytes > MOST_ANSWERS:
            return
        link.known[transfer_id] = since
        self._hub.teach(transfer, link, since + ANSWERED)

    def _forgotten(self, link: Link, transfer_id: str) -> None:
        """The peer takes no part in the transfer."""
        link.promised.pop(transfer_id, None)
        link.forget(transfer_id)
        if link.arriving is not None and link.arriving.transfer == transfer_id:
            self._hub.drop_buffer(link)
        transfer = self._hub.transfers.get(transfer_id)
        if transfer is not None:
            self._hub.leave(transfer, link.peer)

    def _batch(self, link: Link, head: frames.Head, payload: bytearray) -> None:
        """A batch came. Raises FrameRefused when it was not due or is not the coordinator's."""
        text, signature = frames.read_batch(payload)
        hub = self._hub
        with hub.lock:
            transfer_id = link.transfer(head.transfer)
            if transfer_id not in link.inquired and not hub.is_pusher(link):
                raise FrameRefused(f"a batch of transfer {transfer_id[:12]} came unasked")
            if transfer_id in self._declined:
                return
            transfer = hub.transfers.get(transfer_id)
        try:
            if transfer is None:
                self._first(link, transfer_id, text, signature)
                return
            with hub.lock:
                if transfer.job_id == link.job_id and hub.transfers.get(transfer_id) is transfer:
                    self._accept(transfer, text, signature, link)
                    self._tell_all(transfer)
                    self._inquire(transfer_id, link)
        except BatchRefused as error:
            raise FrameRefused(str(error)) from error

    def _first(self, link: Link, transfer_id: str, text: str, signature: str) -> None:
        """The batch that says what the transfer is: the owner decides whether to take part.

        A later one was on its way when the first was declined, and the transfer is wanted by now: all are asked for again.
        """
        if Batch.from_json(text).number:
            with self._hub.lock:
                link.let_fall(len(text), most=self._hub.settings.limits.junk_bytes)
            return
        chain = Chain(transfer_id, self._hub.settings.coordinator_public_key)
        chain.accept(text, signature)
        assert chain.first is not None
        if chain.first.job_id != link.job_id:
            raise FrameRefused(f"a batch of job {chain.first.job_id} came on a connection for job {link.job_id}")
        is_wanted = self._hub.settings.wants(chain.first)
        with self._hub.lock:
            if not is_wanted:
                self._settle(transfer_id)
                self._decline(transfer_id)
                link.taught_at = time.monotonic()
                self._ask_more(link)
                link.say(frames.frame(frames.FORGET, bytes.fromhex(transfer_id)))
            elif transfer_id not in self._hub.transfers:
                self._begin(transfer_id, text, signature, link)
                self._inquire(transfer_id, link)

    def _begin(self, transfer_id: str, text: str, signature: str, source: Link | None) -> Transfer:
        """A transfer becomes known here. Raises BatchRefused, and then it is not."""
        hub = self._hub
        chain = Chain(transfer_id, hub.settings.coordinator_public_key)
        pieces = chain.accept(text, signature)
        assert chain.first is not None
        self._declined.pop(transfer_id, None)
        policy = hub.make_policy(chain.first, hub.uplink, time.monotonic())
        transfer = Transfer(transfer_id, chain.first, chain, policy)
        hub.transfers[transfer_id] = transfer
        self._grow(transfer, pieces, chain.first, (text, signature), source)
        for link in list(hub.links.values()) if source is not None else ():
            if link.job_id == transfer.job_id:
                self._tell(transfer, link)
                if transfer_id in link.promised:
                    hub.join(transfer, link)
        return transfer

    def _accept(self, transfer: Transfer, text: str, signature: str, source: Link | None) -> None:
        """The next batch. Raises BatchRefused."""
        number = transfer.chain.next_number
        pieces = transfer.chain.accept(text, signature)
        if transfer.chain.next_number > number:
            self._grow(transfer, pieces, Batch.from_json(text), (text, signature), source)

    def _grow(
        self, transfer: Transfer, pieces: tuple[Piece, ...], batch: Batch, document: tuple[str, str], source: Link | None
    ) -> None:
        """Tell policy and owner. Pieces that lie in the store already are not fetched again."""
        hub = self._hub
        self._came(transfer, source)
        hub.emit(BatchSeen(transfer.id, batch, *document, peer=source.peer if source is not None else None))
        indices = transfer.extend(pieces)
        held = [index for index in indices if self._is_stored(transfer.pieces[index])]
        for index in held:
            transfer.held |= 1 << index
        is_held = bool(pieces) and len(held) == len(pieces)
        if pieces:
            hub.feed(transfer, Added(tuple(piece.size for piece in pieces), is_held))
        if not is_held:
            for index in held:
                hub.feed(transfer, Arrived(None, index))
        if batch.is_last:
            transfer.is_row_whole = True
            hub.adverts.hurry()
            hub.feed(transfer, Completed())

    def _is_stored(self, piece: Piece) -> bool:
        """Whether it is in the store with its size; the digest is checked when it is read."""
        try:
            return self._store.path(piece.digest).stat().st_size == piece.size
        except OSError:
            return False

    def _owners(self, batch: Batch, text: str) -> Transfer | None:
        """The transfer that the owner's batch continues; None for a first one that is new. Raises BatchRefused."""
        transfers = self._hub.transfers
        if batch.number == 0:
            return transfers.get(text_hash(text))
        for transfer in transfers.values():
            documents = transfer.chain.documents(max(batch.number - 1, 0))
            if documents and text_hash(documents[0][0]) == batch.previous:
                return transfer
        raise BatchRefused(
            f"batch {batch.number} of version {batch.version} follows batch {batch.previous[:12]}, which is not here: add that first"
        )

    def _tell_all(self, transfer: Transfer) -> None:
        for link in list(self._hub.links.values()):
            if link.peer in transfer.members:
                self._tell(transfer, link)

    def _offer(self, transfer: Transfer, link: Link) -> None:
        """News from the owner. A seeder's is taken unasked, and its peers are taken to want it until they say otherwise."""
        if not self._hub.settings.is_seeder:
            self._tell(transfer, link)
            if transfer.id in link.promised:
                self._hub.join(transfer, link)
            return
        self._hub.tell(transfer, link, frames.FOLLOWS)
        self._hub.teach(transfer, link, transfer.chain.next_number)
        self._hub.join(transfer, link)

    def _tell(self, transfer: Transfer, link: Link) -> None:
        """Say how many batches are known here."""
        self._hub.tell(transfer, link, 0)

    def _came(self, transfer: Transfer, source: Link | None) -> None:
        """A batch was accepted: is more to come from whoever was asked?"""
        now = time.monotonic()
        if source is not None:
            source.taught_at = now
            source.unanswered.pop(transfer.id, None)
        asked = self._asking.get(transfer.id)
        if asked is None:
            return
        if transfer.chain.next_number >= asked.until:
            self._settle(transfer.id)
            self._ask_more(asked.link)
        elif asked.link is source:
            asked.since = now

    def _decline(self, transfer_id: str) -> None:
        self._declined[transfer_id] = None
        if len(self._declined) > DECLINED:
            self._declined.popitem(last=False)
