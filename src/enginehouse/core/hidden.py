"""What of a model's configuration is not shown to people who may only look: values that look like secrets.

Pure. LocalAI's configurations may contain tokens, in the section `mcp` and in free options; a key is told by its name.
"""

from __future__ import annotations

import re

HIDDEN = "(hidden)"
_SECRET_SECTIONS = frozenset({"mcp"})
_SECRET_NAME = re.compile(r"token$|secret|passw|api_?key|authorization|credential|bearer", re.IGNORECASE)
_OPTION = re.compile(r"([^:=\s]{1,64})([:=])(.+)", re.DOTALL)


def without_secrets(value: object, name: str = "") -> object:
    """The same value, with everything hidden that may be a secret."""
    if name in _SECRET_SECTIONS and value:
        return HIDDEN
    if isinstance(value, dict):
        return {key: without_secrets(one, str(key)) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(one, name) for one in value]
    if not isinstance(value, str) or not value:
        return value
    if _SECRET_NAME.search(name):
        return HIDDEN
    option = _OPTION.fullmatch(value)  # such as `api_key:abc` in a list of options
    return f"{option[1]}{option[2]}{HIDDEN}" if option and _SECRET_NAME.search(option[1]) else value
