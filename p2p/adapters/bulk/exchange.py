"""Pieces between peers: what was asked, what comes, what goes. Nothing is stored, announced or passed on before its digest was checked.

The last words: a request ends with the piece's last byte, with ABSENT, or with ABORTED, and each request with exactly one of them.
So a node knows at any time what a peer may still send, and takes anything else for a breach.
"""

from __future__ import annotations

import time

from p2p.adapters.bulk.events import GaveUp, PieceStored
from p2p.adapters.bulk.hub import Hub, announced
from p2p.adapters.bulk.link import Arriving, Key, Link
from p2p.adapters.bulk.outbox import Upload
from p2p.adapters.bulk.transfer import Transfer
from p2p.adapters.piece_store import PieceStore
from p2p.domain import bulk_frames as frames
from p2p.domain.swarm_events import Announced, Arrived, Began, Cancelled, Failed, Requested, Sent
from p2p.errors import FrameRefused, PieceCorrupt

PROGRESS_S = 0.2
RATE_SHARE = 0.3  # of the newest measurement in a link's smoothed download rate


class Exchange:
    """The hub's part that deals in pieces. Its methods take the lock for as long as they touch shared state."""

    def __init__(self, hub: Hub, store: PieceStore) -> None:
        self._hub = hub
        self._store = store

    def take(self, link: Link, head: frames.Head, payload: bytearray) -> None:
        """A HAVE, REQUEST, CANCEL, ABSENT or ABORTED frame. Raises FrameRefused."""
        mask = frames.unpack_mask(payload)
        with self._hub.lock:
            transfer_id = link.transfer(head.transfer)
            transfer = self._hub.transfers.get(transfer_id)
            if head.kind == frames.HAVE:
                self._have(link, head, transfer_id, mask)
                return
            key = (transfer_id, head.a)
            if head.kind == frames.REQUEST:
                self._requested(link, transfer, key, is_again=bool(head.flag & frames.AGAIN))
            elif head.kind == frames.CANCEL:
                self._cancelled(link, transfer, key)
            else:
                self._refused(link, transfer, key)

    # --- what comes in

    def begin(self, link: Link, head: frames.Head) -> Arriving | None:
        """A piece begins to arrive; None while there is no room for it. Raises FrameRefused for one that is not due.

        The bytes of a piece that nobody wants any more are read and let fall.
        """
        hub = self._hub
        with hub.lock:
            transfer_id = link.transfer(head.transfer)
            key = (transfer_id, head.a)
            transfer = hub.transfers.get(transfer_id)
            if transfer is None:
                return self._junk(link, head, key)
            self._check_due(link, transfer, key, head)
            size = transfer.pieces[head.a].size
            if transfer.holds(head.a):
                if not link.asked[key]:
                    link.cancel(key)
                return self._arrive(link, head, key, size, None)
            if hub.buffers_left < size and hub.buffers_left < hub.settings.limits.buffer_bytes:
                return None
            return self._arrive(link, head, key, size, hub.take_buffer(size))

    def part(self, link: Link, arriving: Arriving, count: int, flag: int) -> None:
        """`count` bytes more of the piece are here, the last of them perhaps."""
        now = time.monotonic()
        arriving.received += count
        arriving.flag = flag
        if arriving.received == arriving.size:
            self._whole(link, arriving, now)
        elif now - arriving.told_at >= PROGRESS_S:
            arriving.told_at = now
            self._tell_progress(link, arriving, now)

    def _junk(self, link: Link, head: frames.Head, key: Key) -> Arriving:
        """Data of a transfer that is over: let it fall, within reason. Each part counts for itself."""
        link.junk += head.length
        if link.junk > self._hub.settings.limits.junk_bytes:
            raise FrameRefused(f"{link.junk} bytes came for transfers that are over")
        return Arriving(*key, head.transfer, head.length, None, 0.0, told_at=float("inf"))

    def _arrive(self, link: Link, head: frames.Head, key: Key, size: int, buffer: bytearray | None) -> Arriving:
        link.arriving = Arriving(*key, head.transfer, size, buffer, time.monotonic())
        return link.arriving

    def _check_due(self, link: Link, transfer: Transfer, key: Key, head: frames.Head) -> None:
        if head.a >= len(transfer.pieces):
            raise FrameRefused(f"piece {head.a} came; the row of transfer {transfer.id[:12]} has {len(transfer.pieces)}")
        if not link.asked[key] and not self._hub.is_pusher(link):
            raise FrameRefused(f"piece {head.a} of transfer {transfer.id[:12]} was never asked for")
        if head.b != 0:
            raise FrameRefused(f"piece {head.a} of transfer {transfer.id[:12]} begins at byte {head.b}")

    def _tell_progress(self, link: Link, arriving: Arriving, now: float) -> None:
        with self._hub.lock:
            transfer = self._hub.transfers.get(arriving.transfer)
            if transfer is None or arriving.buffer is None:
                return
            spent = now - arriving.since
            rate = arriving.received / spent if spent >= PROGRESS_S else link.down_rate or link.uplink
            left = arriving.size - arriving.received
            self._hub.feed(transfer, Began(link.peer, arriving.index, left, max(rate, 1.0)))

    def _whole(self, link: Link, arriving: Arriving, now: float) -> None:
        """Verify, store, then tell."""
        hub = self._hub
        spent = now - arriving.since
        problem = self._keep(arriving)
        with hub.lock:
            if link.arriving is arriving:
                hub.drop_buffer(link)
            if arriving.buffer is not None:
                hub.spare(arriving.buffer)
            if not link.asked[arriving.key]:
                link.taken.add(arriving.key)
            link.last_word(arriving.key)
            link.bytes_down += arriving.size
            transfer = hub.transfers.get(arriving.transfer)
            if transfer is None or arriving.buffer is None:
                return
            if spent > 0:
                link.down_rate += RATE_SHARE * (arriving.size / spent - link.down_rate)
            transfer.bytes_down += arriving.size
            if isinstance(problem, PieceCorrupt):
                hub.feed(transfer, Failed(link.peer, arriving.index, "corrupt"))
            elif problem is not None:
                self._halt(transfer, f"pieces cannot be stored in {self._store.root}: {problem}; free some space")
            else:
                self.stored(transfer, arriving.index, link.peer, arriving.flag)

    def _keep(self, arriving: Arriving) -> PieceCorrupt | OSError | None:
        """The piece into the store; what went wrong."""
        with self._hub.lock:
            transfer = self._hub.transfers.get(arriving.transfer)
            piece = transfer.pieces[arriving.index] if transfer is not None else None
        if piece is None or arriving.buffer is None:
            return None
        try:
            self._store.put(piece, arriving.buffer)
        except (PieceCorrupt, OSError) as error:
            return error
        return None

    def stored(self, transfer: Transfer, index: int, peer: str | None, flag: int) -> None:
        """A verified piece is in the store, and so are its twins in the row. The lock is held."""
        piece = transfer.pieces[index]
        for place in sorted(transfer.places[piece.digest], key=lambda place: place != index):
            if transfer.holds(place) and place != index:
                continue
            was_held = transfer.holds(place)
            transfer.held |= 1 << place
            if peer is not None and not was_held:
                self._hub.emit(PieceStored(transfer.id, place, piece, peer))
            source = peer if place == index else None
            self._hub.feed(transfer, Arrived(source, place, flag if place == index else 0))

    def _halt(self, transfer: Transfer, reason: str) -> None:
        """Nothing more of this transfer until the owner resumes it."""
        if transfer.halted is not None:
            return
        transfer.halted = reason
        for peer, link in list(transfer.members.items()):
            for key in [key for key in link.wanted if key[0] == transfer.id]:
                link.cancel(key)
            self._hub.leave(transfer, peer)
        self._hub.emit(GaveUp(transfer.id, reason, is_final=True))

    # --- the lock is held

    def _have(self, link: Link, head: frames.Head, transfer_id: str, mask: int) -> None:
        told = Announced(link.peer, mask, head.a, float(head.b), bool(head.flag & frames.SERVES))
        link.uplink = float(head.b)
        transfer = self._hub.transfers.get(transfer_id)
        link.haves[transfer_id] = announced(link.peer, link.haves.get(transfer_id), told)
        if transfer is not None and transfer.members.get(link.peer) is link:
            self._hub.feed(transfer, told)

    def _requested(self, link: Link, transfer: Transfer | None, key: Key, *, is_again: bool) -> None:
        if key in link.owed:
            raise FrameRefused(f"piece {key[1]} of transfer {key[0][:12]} was asked for twice")
        if len(link.owed) >= self._hub.settings.limits.owed:
            raise FrameRefused(f"{len(link.owed)} requests wait for an answer; no more are allowed")
        was_pushed = key in link.pushed
        link.pushed.discard(key)
        if was_pushed and not is_again:
            return  # the push that the request crossed is its answer
        if transfer is None or transfer.members.get(link.peer) is not link or self._hub.throttle.is_spent():
            link.refuse(key)
            return
        if key[1] >= len(transfer.pieces):
            link.refuse(key)
            return
        link.owed.add(key)
        self._hub.feed(transfer, Requested(link.peer, key[1]))

    def _cancelled(self, link: Link, transfer: Transfer | None, key: Key) -> None:
        link.pushed.discard(key)
        if transfer is not None and transfer.members.get(link.peer) is link:
            self._hub.feed(transfer, Cancelled(link.peer, key[1]))
        if key in link.owed:  # it waited with the policy, or the policy does not know the peer any more
            link.outbox.abort(key)
            link.aborted(key)

    def _refused(self, link: Link, transfer: Transfer | None, key: Key) -> None:
        """ABSENT, or ABORTED: a piece of which the rest will not come."""
        if link.arriving is not None and link.arriving.key == key:
            self._hub.drop_buffer(link)
        was_wanted = link.last_word(key)
        if was_wanted and transfer is not None and transfer.members.get(link.peer) is link:
            self._hub.feed(transfer, Failed(link.peer, key[1], "absent"))

    # --- what goes out

    def load(self, link: Link, upload: Upload) -> None:
        """Read an upload's piece and verify it. One that cannot be read is refused."""
        try:
            data = self._store.read(upload.piece.digest)
        except (KeyError, PieceCorrupt, OSError):
            data = b""
        if len(data) == upload.piece.size:
            upload.data = memoryview(data)
            return
        with self._hub.lock:
            self._unreadable(link, upload)

    def _unreadable(self, link: Link, upload: Upload) -> None:
        if link.outbox.abort(upload.key) is None:
            return
        link.refuse(upload.key)
        transfer = self._hub.transfers.get(upload.transfer)
        if transfer is None or not transfer.holds(upload.index):
            return
        for place in transfer.places[upload.piece.digest]:
            transfer.held &= ~(1 << place)
        self._hub.begin_again(transfer)

    def written(self, link: Link, upload: Upload) -> None:
        """The last byte of an upload is on its way. The lock is held."""
        link.is_leaving = True
        if upload.key in link.owed:
            link.owed.discard(upload.key)
        else:
            link.pushed.add(upload.key)

    def sent(self, link: Link, upload: Upload) -> None:
        """The kernel took the last byte."""
        hub = self._hub
        with hub.lock:
            link.is_leaving = False
            link.bytes_up += upload.piece.size
            transfer = hub.transfers.get(upload.transfer)
            if transfer is not None:
                transfer.bytes_up += upload.piece.size
                if transfer.members.get(link.peer) is link:
                    hub.feed(transfer, Sent(link.peer, upload.index))
            hub.was_idle = hub.was_idle or not hub.has_uploads()
