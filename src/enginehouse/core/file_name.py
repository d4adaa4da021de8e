"""Names and sources of a model's files, checked wherever they enter: by the frontend before a row is written, and by
the worker before anything is fetched, because the bus is not trusted.

Pure. An accepted name is a relative path inside the model's directory on every file system; two accepted names of one
model never mean the same file, also where capitals do not count.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

from enginehouse.core.errors import Invalid
from enginehouse.core.name import shown
from enginehouse.core.reference import MAX_URI, is_digest, shown_uri

MAX_FILE_NAME = 1024
MAX_PART_BYTES = 255  # of one component, the limit of file systems
MAX_FILES = 10_000
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SUFFIXES_OF_THE_WORKER = (".part", ".sha256.target")
_MANIFEST = "model.json"
# Schemes of a file that a worker can fetch; `builtin:` and `pypi:` are checked where they are used.
FILE_SCHEMES = ("https://", "http://", "oci://", "ollama://", "file:///", "upload:", "builtin:", "pypi:")


def check_file_name(name: str) -> str:
    """Return `name` if it is a relative path that stays below the model's directory."""
    why = _refusal(name)
    if why:
        raise Invalid(
            f"cannot use {shown(name)} as the name of a model's file: {why}", code="invalid_name", param="files"
        )
    return name


def _refusal(name: str) -> str:
    if not name or len(name) > MAX_FILE_NAME:
        return f"it must have 1 to {MAX_FILE_NAME} characters"
    if not name.isprintable() or "\\" in name or name != unicodedata.normalize("NFC", name):
        return "it has control characters, a backslash or decomposed letters"
    if name.startswith("/"):
        return "it must be a relative path below the model's directory"
    for part in name.split("/"):
        if part.startswith(".") or not part or part != part.strip():
            return "it must be a relative path without '..', hidden or empty parts, and spaces at the ends of a part"
        if len(part.encode()) > MAX_PART_BYTES:
            return f"a part of it is longer than {MAX_PART_BYTES} bytes"
    if name.lower() == _MANIFEST or name.lower().endswith(_SUFFIXES_OF_THE_WORKER):
        return "the worker uses this name itself"
    return ""


def check_file_names(names: Iterable[str]) -> None:
    """Check the names of one model together: none twice, none a directory of another, capitals ignored."""
    seen: set[str] = set()
    directories: set[str] = set()
    for count, name in enumerate(names, 1):
        if count > MAX_FILES:
            raise Invalid(f"cannot use more than {MAX_FILES} files for one model", code="invalid_name", param="files")
        folded = check_file_name(name).casefold()
        parts = folded.split("/")
        above = {"/".join(parts[:length]) for length in range(1, len(parts))}
        if folded in seen or folded in directories or above & seen:
            raise Invalid(
                f"cannot use {shown(name)} as the name of a model's file: another file of the model has that name, "
                "in capitals or not, or is in its place; give each file a name of its own",
                code="invalid_name",
                param="files",
            )
        seen.add(folded)
        directories |= above


def check_file_source(name: str, uri: str, sha256: str) -> None:
    """Check the source of one file: a scheme that workers can fetch, and a digest that is one or empty."""
    if sha256 and not _SHA256.fullmatch(sha256):
        raise _bad_source(name, uri, "its sha256 must be 64 hexadecimal digits in lower case, or empty")
    if len(uri) > MAX_URI or not uri.isprintable() or " " in uri:
        raise _bad_source(name, uri, f"its address must have at most {MAX_URI} printable characters without spaces")
    if not uri.startswith(FILE_SCHEMES):
        raise _bad_source(name, uri, f"its address must begin with one of {', '.join(FILE_SCHEMES)}")
    scheme, _, rest = uri.partition(":")
    match scheme:
        case "upload":
            if not _SHA256.fullmatch(rest) or (sha256 and rest != sha256):
                raise _bad_source(name, uri, "after upload: there must be the sha256 of the file")
        case "oci" | "ollama":
            digest = rest.rpartition("@")[2]
            if not is_digest(digest) or (sha256 and digest != f"sha256:{sha256}"):
                raise _bad_source(name, uri, "it must end in @sha256: and the digest of the file")
        case "file":
            if ".." in rest.split("/"):
                raise _bad_source(name, uri, "its path must not contain '..'")
        case "http" | "https":
            if "@" in rest.removeprefix("//").split("/")[0]:
                raise _bad_source(name, uri, "it has a user name or password; name a credential instead")


def _bad_source(name: str, uri: str, why: str) -> Invalid:
    return Invalid(
        f"cannot fetch {shown(name)} from {shown_uri(uri)!r}: {why}",
        code="unsupported" if not uri.startswith(FILE_SCHEMES) else "invalid_uri",
        param="files",
    )
