"""Registry credentials: the settings of the operator, and the files of docker and podman.

Search order: the operator's mapping, docker's config.json, $REGISTRY_AUTH_FILE, podman's auth.json. Within a file, the
credential helper of a registry takes precedence over a stored password. Files are read at each lookup, so a login
takes effect without a restart. The destinations of a credential are decided in `registry.auth`, not here.
"""

from __future__ import annotations

import asyncio
import asyncio.subprocess
import base64
import binascii
import contextlib
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from enginehouse.core.reference import DOCKER_HUB, ImageReference

log = logging.getLogger(__name__)

HELPER_SECONDS = 30.0
MAX_HELPER_BYTES = 64 * 1024
_HUB_KEY = "https://index.docker.io/v1/"
_HELPER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_IDENTITY_USER = "<token>"  # the user name that docker and its helpers give an identity token


class RegistryCredential(Struct, frozen=True):
    """User and password, or an identity token to exchange for others. Its repr contains neither."""

    user: str = ""
    password: str = ""
    identity_token: str = ""

    def __repr__(self) -> str:
        return "Credential(…)"

    __str__ = __repr__

    @property
    def basic(self) -> str:
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


class _Entry(Struct):
    auth: str = ""
    username: str = ""
    password: str = ""
    identitytoken: str = ""


class _File(Struct, rename="camel"):
    auths: dict[str, _Entry] = {}
    cred_helpers: dict[str, str] = {}
    creds_store: str = ""


class _HelperOutput(Struct, rename="pascal"):
    username: str = ""
    secret: str = ""


class Credentials:
    """`settings` maps registry hosts to `user:password`; `environment` locates the files."""

    def __init__(self, environment: Mapping[str, str], settings: Mapping[str, str]) -> None:
        self._environment = environment
        self._settings = settings

    async def find(self, reference: ImageReference) -> RegistryCredential | None:
        """Return the most specific credential for `reference`. None means anonymous."""
        keys = list(_keys(reference))
        for key in keys:
            if set_here := self._settings.get(key):
                user, _, password = set_here.partition(":")
                return RegistryCredential(user, password)
        for path in _paths(self._environment):
            file = await asyncio.to_thread(_read, path)
            if file is not None and (found := await self._in_file(file, keys)):
                return found
        return None

    async def _in_file(self, file: _File, keys: list[str]) -> RegistryCredential | None:
        for key in keys:
            if helper := file.cred_helpers.get(key):
                return await self._ask(helper, key)
        entries = {_bare(key): entry for key, entry in file.auths.items()}
        for key in keys:
            entry = file.auths.get(key) or entries.get(_bare(key))
            if entry is not None and (found := _credential(entry)):
                return found
        if file.creds_store:
            # Docker stores Docker Hub under a fixed URL and all other registries under their host.
            asked = _HUB_KEY if _HUB_KEY in keys else _bare(keys[-1])
            return await self._ask(file.creds_store, asked)
        return None

    async def _ask(self, helper: str, key: str) -> RegistryCredential | None:
        """Run `docker-credential-NAME get`. A failing helper is logged and means anonymous."""
        if not _HELPER_NAME.fullmatch(helper):
            log.warning("credentials.helper_refused helper=%r", helper[:40])
            return None
        try:
            process = await asyncio.create_subprocess_exec(
                f"docker-credential-{helper}",
                "get",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=dict(self._environment),
            )
        except OSError as error:
            log.warning("credentials.helper_missing helper=%s error=%s", helper, error.strerror)
            return None
        try:
            async with asyncio.timeout(HELPER_SECONDS):
                output, _ = await process.communicate(key.encode())
        except TimeoutError:
            log.warning("credentials.helper_timed_out helper=%s registry=%s", helper, key)
            return None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if process.returncode or len(output) > MAX_HELPER_BYTES:
            return None
        try:
            found = msgspec.json.decode(output, type=_HelperOutput)
        except (msgspec.DecodeError, UnicodeDecodeError):
            log.warning("credentials.helper_unreadable helper=%s registry=%s", helper, key)
            return None
        if found.username == _IDENTITY_USER:
            return RegistryCredential(identity_token=found.secret)
        return RegistryCredential(found.username, found.secret) if found.username else None


def _keys(reference: ImageReference) -> Iterator[str]:
    """Keys of a credential, most specific first: podman's with the repository, then the host alone."""
    parts = reference.repository.split("/")
    for count in range(len(parts), 0, -1):
        yield "/".join((reference.host, *parts[:count]))
    if reference.host == DOCKER_HUB:
        yield from (_HUB_KEY, "index.docker.io", reference.registry)
    yield reference.host


def _bare(key: str) -> str:
    """The host of a key. Older files have URLs as keys, newer ones have hosts."""
    return re.sub(r"^https?://", "", key).removesuffix("/").removesuffix("/v1").removesuffix("/v2")


def _paths(environment: Mapping[str, str]) -> Iterator[Path]:
    if directory := environment.get("DOCKER_CONFIG"):
        yield Path(directory) / "config.json"
    elif home := environment.get("HOME"):
        yield Path(home) / ".docker" / "config.json"
    if file := environment.get("REGISTRY_AUTH_FILE"):
        yield Path(file)
    if directory := environment.get("XDG_RUNTIME_DIR"):
        yield Path(directory) / "containers" / "auth.json"


def _read(path: Path) -> _File | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_File)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        log.warning("credentials.file_unreadable path=%s error=%s", path, type(error).__name__)
        return None


def _credential(entry: _Entry) -> RegistryCredential | None:
    if entry.identitytoken:
        return RegistryCredential(identity_token=entry.identitytoken)
    if entry.username:
        return RegistryCredential(entry.username, entry.password)
    try:
        # Docker pads the value with zero bytes.
        user, _, password = base64.b64decode(entry.auth).decode().rstrip("\0").partition(":")
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None
    return RegistryCredential(user, password) if user else None
