"""The one tree of errors.

    EnginehouseError
    ├── Malformed        the bytes are not what the route takes
    ├── Invalid          understood, and refused
    ├── Unauthenticated  no valid credential
    ├── Denied           a valid credential that may not do this
    ├── NotFound
    ├── Conflict         the thing is not in a state that allows this
    ├── TooLarge
    ├── Unavailable      may succeed later: retry
    │   ├── RateLimited  the same, and the caller has used what it may use for now
    │   └── Upstream     the same, and the fault is on the other side
    └── Hopeless         will never succeed unchanged: do not retry

A class exists only if some caller acts on it; everything finer is the stable `code`. HTTP status, CLI exit code and
the retry decision are each read from the class in one place: the three tables at the end of this file.
Messages start with "cannot …", name the thing and say what to do.
"""

from __future__ import annotations


class EnginehouseError(Exception):
    """An error with a stable code."""

    code = "internal"

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.param = param
        # Seconds after which a retry makes sense; None if it never does or the time is unknown.
        self.retry_after_seconds: float | None = None
        # Additional objects of the error answer, by name: `loading`, `operation`.
        self.details: dict[str, object] = {}


class Malformed(EnginehouseError):
    code = "invalid_json"


class Invalid(EnginehouseError):
    code = "invalid_name"


class Unauthenticated(EnginehouseError):
    code = "unauthenticated"


class Denied(EnginehouseError):
    code = "forbidden"


class NotFound(EnginehouseError):
    code = "not_found"


class Conflict(EnginehouseError):
    code = "conflict"


class TooLarge(EnginehouseError):
    code = "too_large"


class Unavailable(EnginehouseError):
    code = "resource_exhausted"


class RateLimited(Unavailable):
    code = "rate_limited"


class Upstream(Unavailable):
    code = "upstream_error"


class Hopeless(EnginehouseError):
    code = "internal"


HTTP_STATUS: dict[type[EnginehouseError], int] = {
    EnginehouseError: 500,
    Malformed: 400,
    Invalid: 422,
    Unauthenticated: 401,
    Denied: 403,
    NotFound: 404,
    Conflict: 409,
    TooLarge: 413,
    Unavailable: 503,
    RateLimited: 429,
    Upstream: 502,
    Hopeless: 500,
}

# 0 success, 1 failure, 2 invalid usage (click's own), 3 success on some nodes only, 4 unreachable or not allowed, 5 not
# found.
EXIT_CODE: dict[type[EnginehouseError], int] = {
    EnginehouseError: 1,
    Malformed: 2,
    Invalid: 2,
    Unauthenticated: 4,
    Denied: 4,
    NotFound: 5,
    Conflict: 1,
    TooLarge: 2,
    Unavailable: 4,
    RateLimited: 4,
    Upstream: 4,
    Hopeless: 1,
}


def http_status(error: EnginehouseError) -> int:
    return _of_class(HTTP_STATUS, error)


def exit_code(error: EnginehouseError) -> int:
    return _of_class(EXIT_CODE, error)


def _of_class(table: dict[type[EnginehouseError], int], error: EnginehouseError) -> int:
    """An adapter may derive a class that carries more; it counts as the class it was derived from."""
    return next(table[kind] for kind in type(error).__mro__ if kind in table)


def can_heal(error: EnginehouseError) -> bool:
    return isinstance(error, Unavailable)


def from_status(status: int, message: str, *, code: str, param: str | None = None) -> EnginehouseError:
    """The error that a peer described by an HTTP status; the inverse of `http_status`, for the CLI and the worker."""
    by_status = {number: kind for kind, number in HTTP_STATUS.items() if kind is not EnginehouseError}
    if status in (500, 504) or status not in by_status:
        kind: type[EnginehouseError] = Upstream if status >= 500 else Hopeless
    else:
        kind = by_status[status]
    return kind(message, code=code, param=param)
