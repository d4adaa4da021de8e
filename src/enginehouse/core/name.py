"""Names that users and machines give to things, checked at every boundary.

Two accepted names never share a directory or a bus subject: names of nodes and backends are plain path components, and
`model_directory` maps model names to directories injectively.
"""

from __future__ import annotations

import re

from enginehouse.core.errors import Invalid

MAX_NAME = 128  # one path component, with room for the suffixes of staging directories
MAX_MODEL_NAME = 255
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SAFE_IN_DIRECTORY = re.compile(r"[A-Za-z0-9._-]")


def shown(value: str) -> str:
    """Quote a name for a message, truncated if it is long."""
    return repr(value if len(value) <= 40 else value[:37] + "...")


def check_name(value: str, what: str) -> str:
    """Return `value` if it is a valid name of a node, a backend, an alias or a label."""
    if not value:
        raise Invalid(f"cannot use an empty name for a {what}: give it a name", code="invalid_name", param="name")
    if len(value) > MAX_NAME:
        raise Invalid(
            f"cannot use {shown(value)} as a {what} name: {len(value)} characters, at most {MAX_NAME} are allowed",
            code="invalid_name",
            param="name",
        )
    if not _NAME.fullmatch(value) or value.endswith("."):
        raise Invalid(
            f"cannot use {shown(value)} as a {what} name: use letters, digits, '.', '_' and '-', "
            "beginning with a letter or digit and not ending with '.'",
            code="invalid_name",
            param="name",
        )
    return value


def check_model_name(value: str) -> str:
    """Return `value` if it is a valid model name: printable, at most 255 characters, no control characters."""
    if not value or len(value) > MAX_MODEL_NAME or not value.isprintable() or value != value.strip():
        raise Invalid(
            f"cannot use {shown(value)} as a model name: use 1 to {MAX_MODEL_NAME} printable characters "
            "without spaces at either end",
            code="invalid_name",
            param="model",
        )
    return value


def model_directory(name: str) -> str:
    """A path component for a model name; different names give different components.

    Safe ASCII stays readable, every other byte becomes `%XX`. A leading dot is encoded too, so the result is never
    hidden, `.` or `..`. A result too long for a file system keeps its start and ends in a digest of the whole, marked
    by `%%`, which the encoding never produces.
    """
    encoded = "".join(
        character
        if _SAFE_IN_DIRECTORY.fullmatch(character) and not (index == 0 and character == ".")
        else "".join(f"%{byte:02X}" for byte in character.encode())
        for index, character in enumerate(name)
    )
    if len(encoded) <= 200:
        return encoded
    import hashlib

    return f"{encoded[:120]}%%{hashlib.sha256(name.encode()).hexdigest()}"


def model_in(directory: str) -> str:
    """The inverse of `model_directory`; "" if the name was too long, or if the directory is not a model's."""
    from urllib.parse import unquote

    name = "" if "%%" in directory else unquote(directory, errors="replace")
    return name if model_directory(name) == directory else ""
