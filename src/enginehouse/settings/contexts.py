"""Named servers of a person: an address and its token, so that a machine without a data directory needs no options.

They are in one file of the user's configuration directory, which only its owner may read. A context is used as a pair:
its address with its token, so no token of one server is ever sent to another. Only read here; `enginehouse login` and
its kin write the file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from enginehouse.core.errors import Invalid

FILE = "contexts.json"
LOCAL = "local"  # the name that always means the server of this machine's data directory


class ServerContext(Struct, frozen=True):
    url: str
    token: str = ""


class StoredContexts(Struct, frozen=True, kw_only=True):
    current: str = ""  # "" is the server of this machine's data directory
    contexts: dict[str, ServerContext] = {}


def contexts_path(environ: Mapping[str, str]) -> Path:
    home = environ.get("HOME") or os.path.expanduser("~")
    shared = environ.get("XDG_CONFIG_HOME", "")
    if os.path.isabs(shared):
        return Path(shared, "enginehouse", FILE)
    if sys.platform == "darwin":
        return Path(home, "Library", "Application Support", "enginehouse", FILE)
    return Path(home, ".config", "enginehouse", FILE)


def read_contexts(environ: Mapping[str, str]) -> StoredContexts:
    path = contexts_path(environ)
    try:
        return msgspec.json.decode(path.read_bytes(), type=StoredContexts)
    except (FileNotFoundError, NotADirectoryError):
        return StoredContexts()
    except OSError as error:
        raise _refused(f"cannot read {path}: {error.strerror or error}") from error
    except msgspec.DecodeError as error:
        raise _refused(f"cannot read {path}: {error}. Remove it and sign in again with `enginehouse login`") from error


def named_context(stored: StoredContexts, name: str, place: str) -> ServerContext | None:
    """The context of this name; None for the server of this machine."""
    if name in ("", LOCAL):
        return None
    found = stored.contexts.get(name)
    if found is None:
        known = ", ".join((*sorted(stored.contexts), LOCAL))
        raise _refused(
            f"cannot use {name!r} from {place}: there is no such context; there are {known}. "
            "`enginehouse login URL --name NAME` makes one"
        )
    return found


def chosen_context(flags: Mapping[str, object], environ: Mapping[str, str], *, in_file: bool) -> ServerContext | None:
    """The context that a client command uses: `--context`, ENGINEHOUSE_CONTEXT, or the current one.

    An address or a data directory that is given as a flag or a variable is nearer than the current context; `in_file`
    says that the settings file has an address.
    """
    flag, variable = flags.get("context"), environ.get("ENGINEHOUSE_CONTEXT", "")
    if flag:
        if flags.get("url"):
            raise _refused("cannot use --context and --url together: each of them names a server")
        return named_context(read_contexts(environ), str(flag), "--context")
    if flags.get("url") or environ.get("ENGINEHOUSE_URL") or flags.get("data"):
        return None
    if variable:
        return named_context(read_contexts(environ), variable, "ENGINEHOUSE_CONTEXT")
    if environ.get("ENGINEHOUSE_DATA") or in_file:
        return None
    stored = read_contexts(environ)
    return named_context(stored, stored.current, str(contexts_path(environ)))


def _refused(message: str) -> Invalid:
    return Invalid(message, code="invalid_setting", param="context")
