"""Credentials for sources of models, by name.

A row, a log line and a message carry the name only. Values come from a file of the operator and from the environment of
this program, and are sent to the source alone: the client drops them at a redirect to another host.
"""

from __future__ import annotations

from collections.abc import Mapping

from enginehouse.core.errors import Denied, Invalid
from enginehouse.core.name import shown

VARIABLE = "ENGINEHOUSE_CREDENTIAL_"
HUGGINGFACE = "HF_TOKEN"  # LocalAI's and the hub's own variable


class ModelCredentials:
    """`values` by name, from the file; variables `ENGINEHOUSE_CREDENTIAL_NAME` and `HF_TOKEN` add to them."""

    def __init__(self, values: Mapping[str, str], environment: Mapping[str, str]) -> None:
        named = {key.removeprefix(VARIABLE): value for key, value in environment.items() if key.startswith(VARIABLE)}
        if environment.get(HUGGINGFACE):
            named.setdefault(HUGGINGFACE, environment[HUGGINGFACE])
        self._values = {**named, **values}

    def __repr__(self) -> str:
        return f"ModelCredentials({', '.join(sorted(self._values))})"

    def has(self, name: str) -> bool:
        return name in self._values

    def value(self, name: str) -> str:
        found = self._values.get(name) or self._values.get(name.upper().replace("-", "_"))
        if not found:
            raise Invalid(
                f"cannot find the credential {shown(name)}: add it to the file of --model-credentials or set "
                f"{VARIABLE}{name.upper().replace('-', '_')[:40]} for the frontends and the workers",
                code="invalid_name",
                param="credential",
            )
        return found

    def headers(self, name: str) -> dict[str, str]:
        """The header that presents a credential; {} without a name."""
        return {"authorization": f"Bearer {self.value(name)}"} if name else {}


def gated(what: str, name: str) -> Denied:
    """The error for a source that refuses access, with what to set."""
    if name:
        hint = (
            f"check that the credential {shown(name)} is valid and that its owner has accepted the terms of the model"
        )
    else:
        hint = (
            "it is private, gated or does not exist. Accept its terms on its page, then set a token (HF_TOKEN, or a "
            "credential in the file of --model-credentials, named with `credential`)"
        )
    return Denied(f"cannot read {what}: access denied; {hint}", code="forbidden", param="credential")
