"""The one way a REST command refuses. The API turns it into a problem document; the service knows no status codes.

RequestRefused
kind says whose move is next: the client's (all but UNAVAILABLE) or nobody's but time's (UNAVAILABLE, with a delay)
"""

from __future__ import annotations

from enum import StrEnum


class Kind(StrEnum):
    """Why, in the classes that clients act on."""

    MALFORMED = "malformed"  # not the syntax that was announced
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    UNKNOWN = "unknown"
    CONFLICT = "conflict"  # the state of the thing does not allow it
    SLOW = "slow"  # the body did not arrive in time
    TOO_LARGE = "too_large"
    UNSUPPORTED = "unsupported"  # a media type or encoding that is not taken
    INVALID = "invalid"  # well-formed, and a value is wrong
    UNAVAILABLE = "unavailable"


class RequestRefused(Exception):
    """A refusal in words: `detail` holds the value, `field` its place in the request, `fix` the next step."""

    def __init__(
        self,
        kind: Kind,
        code: str,
        detail: str,
        *,
        field: str | None = None,
        fix: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(detail)
        self.kind = kind
        self.code = code
        self.detail = detail
        self.field = field
        self.fix = fix
        self.retry_after_s = retry_after_s


def unknown(what: str, identifier: str) -> RequestRefused:
    """Nothing of that id exists, or the caller may not know that it does."""
    return RequestRefused(
        Kind.UNKNOWN,
        f"unknown_{what}",
        f"there is no {what} {identifier!r} that this token may see",
        field=f"{what}_id",
        fix=f"list the {what}s to see their ids: echo2 {what} list",
    )


def invalid(code: str, detail: str, *, field: str, fix: str) -> RequestRefused:
    """A well-formed request with a wrong value."""
    return RequestRefused(Kind.INVALID, code, detail, field=field, fix=fix)


def conflict(code: str, detail: str, *, field: str, fix: str) -> RequestRefused:
    """The thing's state does not allow it."""
    return RequestRefused(Kind.CONFLICT, code, detail, field=field, fix=fix)


def forbidden(code: str, detail: str, *, field: str, fix: str) -> RequestRefused:
    """The token may not."""
    return RequestRefused(Kind.FORBIDDEN, code, detail, field=field, fix=fix)


def unavailable(code: str, detail: str, *, fix: str, retry_after_s: float) -> RequestRefused:
    """Not now; the same request may succeed after the delay."""
    return RequestRefused(Kind.UNAVAILABLE, code, detail, fix=fix, retry_after_s=retry_after_s)
