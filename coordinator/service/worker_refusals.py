"""Why a request of the worker protocol is refused: what becomes its problem document.

ProtocolRefusal carries the HTTP status, a stable code, words, and the fix. Codes are listed in `wire/PROTOCOL.md`.
"""

from __future__ import annotations


class ProtocolRefusal(Exception):
    """A request that is answered with a problem document instead of what it asked for."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        fix: str,
        field: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(f"{code}: {detail}")
        self.status = status
        self.code = code
        self.detail = detail
        self.fix = fix
        self.field = field
        self.retry_after_s = retry_after_s


def busy(code: str, detail: str, *, retry_after_s: float) -> ProtocolRefusal:
    """503: nothing is wrong with the request, but it must come later."""
    return ProtocolRefusal(503, code, detail, fix=f"ask again in {retry_after_s:.1f} s", retry_after_s=retry_after_s)


def too_many(what: str, *, retry_after_s: float) -> ProtocolRefusal:
    """429: more requests than one key or address may make."""
    return ProtocolRefusal(
        429, "too_many_requests", f"too many {what}", fix=f"ask again in {retry_after_s:.1f} s", retry_after_s=retry_after_s
    )
