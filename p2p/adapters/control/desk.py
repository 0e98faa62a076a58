"""`Desk`: the coordinator's end of `HttpsControl`. A route hands it the proven author's key, the path and the body, and sends what it returns."""

from __future__ import annotations

from collections.abc import Callable

from p2p.adapters.control.https import POLL, PUBLISH, REQUEST
from p2p.adapters.control.ports import Handler
from p2p.domain.control_board import Ask, Board, Poll, Publication, page_to_bytes
from p2p.domain.control_frames import check_size
from p2p.errors import ControlRefused

Admit = Callable[[str, str, bytes], bool]
"""(topic, author's key, payload) -> whether it may stand on the board: the same judgement as the validators of gossip."""


class Desk:
    """The board, and the answers of the coordinator. `author` is always the key that the request's signature proves."""

    def __init__(self, board: Board, admit: Admit) -> None:
        self.board = board
        self._admit = admit
        self._handlers: dict[str, Handler] = {}

    def handle(self, protocol: str, handler: Handler) -> None:
        """Answer requests of this protocol; give the same handler to the ControlNet."""
        self._handlers[protocol] = handler

    async def post(self, author: str, path: str, body: bytes) -> bytes:
        """The reply to one call. Raises ControlRefused, for the route to tell as a client error in words."""
        if path == PUBLISH:
            return self._publish(author, Publication.from_bytes(body))
        if path == POLL:
            poll = Poll.from_bytes(body)
            return page_to_bytes(self.board.page(frozenset(poll.topics), poll.after))
        if path == REQUEST:
            return await self._request(author, Ask.from_bytes(body))
        raise ControlRefused(f"{path[:80]!r} is no path of the control plane: use {PUBLISH}, {POLL} or {REQUEST}")

    def _publish(self, author: str, publication: Publication) -> bytes:
        if not self._admit(publication.topic, author, publication.payload):
            raise ControlRefused(f"what you publish under {publication.topic} is not admitted: not yours to say, or not signed")
        self.board.put(publication.topic, author, publication.slot, publication.payload)
        return b""

    async def _request(self, author: str, ask: Ask) -> bytes:
        handler = self._handlers.get(ask.protocol)
        if handler is None:
            raise ControlRefused(f"the coordinator does not answer {ask.protocol}: it knows {sorted(self._handlers)}")
        answer = await handler(author, ask.payload)
        check_size(f"the answer to {ask.protocol}", answer)
        return answer
