"""Pieces between peers: what was asked, what comes, what goes. Nothing is stored, announced or passed on before its digest was checked.

The last words: a request ends with the piece's last byte, with ABSENT, or with ABORTED, and each request with exactly one of them.
So a node knows at any time what a peer may still send, and takes anything else for a breach.
"""

from __future__ import annotations

import time
from functools import partial

from p2p.adapters.bulk.clerk import Clerk
from p2p.adapters.bulk.events import GaveUp, PieceStored
from p2p.adapters.bulk.hub import Hub
from p2p.adapters.bulk.link import Arriving, Heard, Key, Link
from p2p.adapters.bulk.outbox import Upload
from p2p.adapters.bulk.recent import Held
from p2p.adapters.bulk.transfer import Transfer
from p2p.adapters.piece_store import PieceStore
from p2p.codec import pieces
from p2p.domain import bulk_frames as frames
from p2p.domain.swarm_events import Announced, Arrived, Began, Cancelled, Failed, Requested, Sent
from p2p.domain.swarm_limits import SwarmLimits
from p2p.errors import FrameRefused, PieceCorrupt

PROGRESS_S = 0.2
RATE_SHARE = 0.3  # of the newest measurement in a link's smoothed download rate
MOST_PIECES = SwarmLimits().pieces  # of a row that goes on, as far as a peer's word on it is kept


class Exchange:
    """The hub's part that deals in pieces. Its methods take the lock for as long as they touch shared state."""

    def __init__(self, hub: Hub, store: PieceStore, clerk: Clerk) -> None:
        self._hub = hub
        self._store = store
        self._clerk = clerk

    def take(self, link: Link, head: frames.Head, payload: bytearray) -> None:
        """A HAVE, REQUEST, CANCEL, ABSENT or ABORTED frame. Raises FrameRefused."""
        mask = frames.unpack_mask(payload) if payload else 0
        with self._hub.lock:
            transfer_id = link.transfer(head.transfer)
            if head.kind == frames.HAVE:
                self._have(link, head, transfer_id, mask)
                return
            transfer = self._hub.transfers.get(transfer_id)
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
            if hub.recent.is_full or (hub.buffers_left < size and hub.buffers_left < hub.settings.limits.buffer_bytes):
                return None
            return self._arrive(link, head, key, size, hub.take_buffer(size))

    def part(self, link: Link, arriving: Arriving, count: int, flag: int) -> None:
        """`count` bytes more of the piece are here, the last of them perhaps."""
        arriving.received += count
        arriving.flag = flag
        if arriving.received == arriving.size:
            self._whole(link, arriving, time.monotonic())

    def progress(self, link: Link, now: float) -> None:
        """Nothing more is here for now: tell of the piece that came in part."""
        arriving = link.arriving
        if arriving is not None and arriving.received and now - arriving.told_at >= PROGRESS_S:
            arriving.told_at = now
            self._tell_progress(link, arriving, now)

    def _junk(self, link: Link, head: frames.Head, key: Key) -> Arriving:
        """Data of a transfer that is over: let it fall, within reason. Each part counts for itself."""
        link.let_fall(head.length, most=self._hub.settings.limits.junk_bytes)
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
        """Verify, pass on, have it stored."""
        hub = self._hub
        is_right = self._is_right(arriving)
        with hub.lock:
            is_due, link.arriving = link.arriving is arriving, None
            if not link.asked[arriving.key]:
                link.taken.add(arriving.key)
            link.last_word(arriving.key)
            link.bytes_down += arriving.size
            if arriving.buffer is None or not is_due:
                return
            transfer = hub.transfers.get(arriving.transfer)
            if transfer is not None and now > arriving.since:
                link.down_rate += RATE_SHARE * (arriving.size / (now - arriving.since) - link.down_rate)
                transfer.bytes_down += arriving.size
            if transfer is not None and is_right and transfer.halted is None:
                self._take(transfer, arriving, arriving.buffer, link.peer)
                return
            hub.buffers_left += arriving.size
            hub.recent.spare(arriving.buffer)
            if transfer is not None and not is_right:
                hub.feed(transfer, Failed(link.peer, arriving.index, "corrupt"))

    def _is_right(self, arriving: Arriving) -> bool:
        """Whether the bytes are the piece's."""
        transfer = self._hub.transfers.get(arriving.transfer)
        if transfer is None or arriving.buffer is None:
            return True
        try:
            pieces.verify(transfer.pieces[arriving.index], arriving.buffer)
        except PieceCorrupt:
            return False
        return True

    def _take(self, transfer: Transfer, arriving: Arriving, data: bytearray, peer: str) -> None:
        """A piece is here and right: the policy goes on at once, the clerk writes it; it is announced after that. The lock is held."""
        digest = transfer.pieces[arriving.index].digest
        new = [place for place in transfer.places[digest] if not transfer.holds(place)]
        if new:
            transfer.unwritten |= _mask(new)
            held = self._hub.recent.add(digest, data, is_written=False)
            self._clerk.do(partial(self._write, transfer, arriving.index, held, new, peer))
        else:
            self._hub.buffers_left += len(data)
            self._hub.recent.spare(data)
        self.arrived(transfer, arriving.index, peer, arriving.flag)

    def _write(self, transfer: Transfer, index: int, held: Held, new: list[int], peer: str) -> None:
        """A piece into the store; the clerk's work."""
        hub, piece = self._hub, transfer.pieces[index]
        try:
            self._store.keep(piece, held.data)
        except OSError as error:
            with hub.lock:
                hub.buffers_left += piece.size
                hub.recent.written(piece.digest)
                hub.recent.drop(piece.digest)
                transfer.held &= ~_mask(transfer.places[piece.digest])
                transfer.unwritten &= ~_mask(new)
                self._halt(transfer, f"pieces cannot be stored in {self._store.root}: {error}; free some space")
            return
        with hub.lock:
            hub.buffers_left += piece.size
            hub.recent.written(piece.digest)
            if not transfer.is_wanted(index):
                hub.recent.drop(piece.digest)
            transfer.unwritten &= ~_mask(new)
            hub.report(transfer)
        for place in new:
            self._clerk.tell(PieceStored(transfer.id, place, piece, peer))

    def arrived(self, transfer: Transfer, index: int, peer: str | None, flag: int) -> None:
        """A verified piece is here, and so are its twins in the row. The lock is held."""
        for place in sorted(transfer.places[transfer.pieces[index].digest], key=lambda place: place != index):
            if transfer.holds(place) and place != index:
                continue
            transfer.held |= 1 << place
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
        """What a peer holds of a transfer that is known here; it is not told to those who do not take part, so other words are let fall.

        The row may go on beyond the batches that are here, and a piece is announced once. Pieces beyond any row are the policy's to judge.
        """
        link.uplink = float(head.b)
        transfer = self._hub.transfers.get(transfer_id)
        if transfer is None or transfer.job_id != link.job_id:
            return
        heard = link.haves.setdefault(transfer_id, Heard())
        most = len(transfer.pieces) if transfer.is_row_whole else max(len(transfer.pieces), MOST_PIECES)
        heard.pieces |= mask & ((1 << most) - 1)
        heard.queue, heard.uplink, heard.serves = head.a, link.uplink, bool(head.flag & frames.SERVES)
        if transfer.members.get(link.peer) is link:
            self._hub.feed(transfer, Announced(link.peer, mask, head.a, link.uplink, heard.serves))

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

    def seek(self, link: Link, upload: Upload) -> bool:
        """Find an upload's piece; whether it is in memory. One for which a disk would be waited for is read by the clerk."""
        hub, piece = self._hub, upload.piece
        with hub.lock:
            upload.held = hub.recent.lend(piece.digest)
            if upload.held is not None or upload.is_sought:
                return upload.held is not None
            buffer = hub.recent.take(piece.size)
        try:
            self._store.load(piece, buffer, waits=False)
        except (KeyError, PieceCorrupt, OSError):  # the clerk finds out why
            upload.is_sought = True
            self._clerk.do(partial(self._read, link, upload, buffer))
            return False
        self._found(upload, buffer)
        return True

    def _read(self, link: Link, upload: Upload, buffer: bytearray) -> None:
        """A piece from the store; the clerk's work. One that cannot be read is refused."""
        try:
            self._store.load(upload.piece, buffer)
        except (KeyError, PieceCorrupt, OSError):
            with self._hub.lock:
                self._hub.recent.spare(buffer)
                self._unreadable(link, upload)
            return
        self._found(upload, buffer)
        with self._hub.lock:
            link.wake()

    def _found(self, upload: Upload, buffer: bytearray) -> None:
        with self._hub.lock:
            self._hub.recent.add(upload.piece.digest, buffer, is_written=True)
            upload.held = self._hub.recent.lend(upload.piece.digest)

    def _unreadable(self, link: Link, upload: Upload) -> None:
        if link.outbox.abort(upload.key) is None:
            return
        link.refuse(upload.key)
        transfer = self._hub.transfers.get(upload.transfer)
        if transfer is None or not transfer.holds(upload.index):
            return
        transfer.held &= ~_mask(transfer.places[upload.piece.digest])
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
            if upload.held is not None:
                upload.held.users -= 1
            link.is_leaving = False
            link.bytes_up += upload.piece.size
            transfer = hub.transfers.get(upload.transfer)
            if transfer is not None:
                transfer.bytes_up += upload.piece.size
                if not transfer.is_wanted(upload.index, besides=link.peer):
                    hub.recent.drop(upload.piece.digest)
                if transfer.members.get(link.peer) is link:
                    hub.feed(transfer, Sent(link.peer, upload.index))
            hub.was_idle = hub.was_idle or not hub.has_uploads()


def _mask(places: list[int]) -> int:
    return sum(1 << place for place in places)
