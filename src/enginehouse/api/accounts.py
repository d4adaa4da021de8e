"""What a request may use, and what it has used: the allowance of its token before it, its counts after it.

Called by the inference routes. Only a token with an allowance is checked before a request; what was used is counted
for every token, in memory. Nothing here waits.
"""

from __future__ import annotations

import math

from enginehouse.api.metrics import Metrics
from enginehouse.api.openai import Finished
from enginehouse.core.errors import Denied, RateLimited
from enginehouse.core.name import shown
from enginehouse.core.rate import Remainder
from enginehouse.frontend.fleet.rate_limits import Admission, RateLimits
from enginehouse.frontend.fleet.tokens import Caller
from enginehouse.frontend.fleet.usage import UsageLedger
from enginehouse.frontend.watching.traffic import TrafficCounts

CLIENT_ERRORS = 400  # from this status on, a request counts as an error
SERVER_ERRORS = 500  # from this status on, the client is not to blame
_NOT_IMPLEMENTED = 501  # the engine does not have the route; no version is to blame for that
_CLIENT_GONE = 499  # not an error of the cluster
_NOT_ADMITTED = (401, 403)  # neither of these is traffic; who waits for a limit, or finds a queue full, is
_REFUSED_HERE = (401, 403, 429)  # without a node these are answers of this frontend, and nothing was used
_WAITING = 1.0  # seconds; the least that `Retry-After` can say


class Accounts:
    def __init__(self, metrics: Metrics, limits: RateLimits, ledger: UsageLedger, traffic: TrafficCounts) -> None:
        self._metrics = metrics
        self._traffic = traffic
        self._limits = limits
        self._ledger = ledger

    def admit(self, caller: Caller, model: str, headers: list[tuple[bytes, bytes]]) -> None:
        """Raise `Denied` or `RateLimited` if the allowance of the caller does not cover the request."""
        try:
            check_model(caller, model)
        except Denied as error:
            self._metrics.denied(error.code)
            raise
        allowance = caller.allowance
        if allowance is None or not allowance.is_counted:
            return
        admission = self._limits.admit(caller.token_id, allowance)
        headers += _headers(admission)
        if admission.refused_by:
            self._metrics.rate_limited(caller.name, admission.refused_by)
            raise _refusal(admission)

    def request_done(self, done: Finished) -> None:
        self._metrics.request_done(done)
        caller = done.caller
        is_error = done.status >= CLIENT_ERRORS and done.status != _CLIENT_GONE
        if done.node or done.status not in _NOT_ADMITTED:
            self._traffic.count(
                done.model,
                done.node_id,
                tokens=done.used.completion_tokens if done.used is not None else 0,
                is_error=is_error,
                first_token_seconds=done.first_token_seconds,
            )
        if caller is None or (done.status in _REFUSED_HERE and not done.node):
            return
        is_failure = done.is_broken or (done.status >= SERVER_ERRORS and done.status != _NOT_IMPLEMENTED)
        place = caller.token_id, caller.name, done.model, done.node
        self._ledger.count(place, done.used, is_error=is_error, is_failure=is_failure)
        if caller.allowance is not None and caller.allowance.tokens_per_minute and done.used is not None:
            self._limits.count_tokens(caller.token_id, done.used.prompt_tokens + done.used.completion_tokens)


def check_model(caller: Caller, model: str) -> None:
    """Raise `Denied` if the caller may not use the model, whether it exists or not."""
    if caller.allowance is not None and not caller.allowance.admits(model):
        raise Denied(
            f"cannot use the model {shown(model)} with this token: it is not one of the models that the token allows; "
            "GET /v1/models lists those",
            param="model",
        )


def _refusal(admission: Admission) -> RateLimited:
    used_up = admission.requests if admission.refused_by == "requests" else admission.tokens
    assert used_up is not None
    wait = max(_WAITING, math.ceil(admission.wait_seconds))
    error = RateLimited(
        f"cannot answer yet: this token may use {used_up.limit} {admission.refused_by} per minute, and has used them; "
        f"retry in {wait:.0f} s"
    )
    error.retry_after_seconds = wait
    return error


def _headers(admission: Admission) -> list[tuple[bytes, bytes]]:
    """The headers that OpenAI's clients know, for each limit that the token has."""
    pairs: list[tuple[bytes, Remainder | None]] = [(b"requests", admission.requests), (b"tokens", admission.tokens)]
    found: list[tuple[bytes, bytes]] = []
    for kind, one in pairs:
        if one is not None:
            found += (
                (b"x-ratelimit-limit-" + kind, b"%d" % one.limit),
                (b"x-ratelimit-remaining-" + kind, b"%d" % one.left),
                (b"x-ratelimit-reset-" + kind, b"%ds" % math.ceil(one.reset_seconds)),
            )
    return found
