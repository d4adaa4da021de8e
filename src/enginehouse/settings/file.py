"""The settings file: flat TOML, with an optional table per program.

A key at the top applies to every program that has the setting; a key in a table such as `[worker]` applies to that
program only and takes precedence. Unknown keys are errors: a misspelt setting must not be ignored silently.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any

from enginehouse.core.errors import Invalid


def read_file(
    path: Path, program: str, known: Mapping[str, Set[str]], *, is_required: bool
) -> dict[str, tuple[object, str]]:
    """The values for `program`, each with its place as errors name it; `known` has the settings of every program."""
    content = _parse(path, is_required)
    _refuse_unknown((key for key in content if key not in known), set().union(*known.values()), path)
    own: dict[str, object] = {}
    for title, names in known.items():
        table = content.pop(title, {})
        if not isinstance(table, dict):
            raise _refused(f"cannot use {title} in {path}: it must be a table [{title}]")
        _refuse_unknown(table, names, path, f"[{title}] ")
        if title == program:
            own = table
    return {name: (value, f"{name} in {path}") for name, value in {**content, **own}.items()}


def _parse(path: Path, is_required: bool) -> dict[str, Any]:
    try:
        return _loaded(path)
    except (FileNotFoundError, NotADirectoryError):
        if is_required:
            raise _refused(f"cannot read {path}: there is no such file") from None
        return {}
    except OSError as error:
        raise _refused(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise _refused(f"cannot read {path}: it is not TOML: {error}") from error


def _loaded(path: Path) -> dict[str, Any]:
    """Raises `OSError`, or `ValueError` if the file is not TOML."""
    text = path.read_text("utf-8")
    import tomllib  # here, because most programs have no such file

    return tomllib.loads(text)


def _refuse_unknown(keys: Iterable[str], known: Set[str], path: Path, where: str = "") -> None:
    for key in keys:
        if key not in known:
            raise _refused(
                f"cannot use {where}{key} in {path}: there is no such setting; there are {', '.join(sorted(known))}",
                key,
            )


def _refused(message: str, param: str | None = None) -> Invalid:
    return Invalid(message, code="invalid_setting", param=param)


def read_model_credentials(path: Path | None) -> dict[str, str]:
    """Credentials of sources of models by name, from lines of `NAME = "SECRET"`. Messages never contain the values."""
    if path is None:
        return {}
    try:
        content = _loaded(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else 'it must have lines like name = "secret"'
        raise _refused(f"cannot read credentials of models from {path}: {reason}", "model_credentials") from None
    if any(not isinstance(value, str) or not value for value in content.values()):
        raise _refused(f'cannot use {path}: it must have lines like name = "secret"', "model_credentials")
    return content


def read_credentials(path: Path | None) -> dict[str, str]:
    """Credentials by registry, from lines of `HOST = "USER:PASSWORD"`. Error messages never contain the values."""
    if path is None:
        return {}
    try:
        content = _loaded(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else 'it must have lines like "host" = "user:password"'
        raise Invalid(
            f"cannot read registry credentials from {path}: {reason}",
            code="invalid_setting",
            param="registry_credentials",
        ) from None
    for host, value in content.items():
        if not isinstance(value, str) or ":" not in value:
            raise Invalid(
                f'cannot use {path}: the value of {host!r} is not written as "user:password"',
                code="invalid_setting",
                param="registry_credentials",
            )
    return content
