"""What a token may use: which models, and how many requests and tokens per minute.

Pure. An allowance exists only for tokens that are limited, so that requests with other tokens check nothing. A pattern
of models is a name or a glob (`*`, `?`, `[abc]`), compared with case; `*` also matches slashes.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from msgspec import Struct

from enginehouse.core.errors import Invalid
from enginehouse.core.name import check_model_name

MAX_PATTERNS = 100  # every request with the token may be compared with each of them
MAX_PER_MINUTE = 10**12  # more than any cluster does


class Allowance(Struct, frozen=True, kw_only=True):
    """The limits of one token. No patterns means every model, and 0 means no limit."""

    models: tuple[str, ...] = ()
    requests_per_minute: int = 0
    tokens_per_minute: int = 0

    def admits(self, model: str) -> bool:
        return not self.models or any(fnmatchcase(model, pattern) for pattern in self.models)

    @property
    def is_counted(self) -> bool:
        return bool(self.requests_per_minute or self.tokens_per_minute)


def make_allowance(models: Sequence[str], requests_per_minute: int, tokens_per_minute: int) -> Allowance | None:
    """None if nothing is limited; raises `Invalid` for a limit that cannot be used."""
    if len(models) > MAX_PATTERNS:
        raise Invalid(
            f"cannot allow {len(models)} models: at most {MAX_PATTERNS} names or patterns are possible; use a pattern",
            code="unsupported",
            param="models",
        )
    for name, limit in (("requests_per_minute", requests_per_minute), ("tokens_per_minute", tokens_per_minute)):
        if not 0 <= limit <= MAX_PER_MINUTE:
            raise Invalid(
                f"cannot use {limit} as `{name}`: use a number from 1 to {MAX_PER_MINUTE}, or 0 for no limit",
                code="unsupported",
                param=name,
            )
    if not models and not requests_per_minute and not tokens_per_minute:
        return None
    return Allowance(
        models=tuple(dict.fromkeys(check_model_name(one) for one in models)),
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
    )
