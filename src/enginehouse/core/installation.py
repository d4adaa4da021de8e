"""Backends on disk: LocalAI's `metadata.json`, the names used while a directory is replaced, the listing.

Pure: the worker reads the directories and passes what it found. An unreadable directory is skipped or shown as broken;
it never hides the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec
from msgspec import Struct

from enginehouse.core.artifact import Artifact
from enginehouse.core.backend import InstalledBackend, Resolved
from enginehouse.core.errors import Invalid
from enginehouse.core.name import check_name
from enginehouse.core.reference import parse_uri
from enginehouse.core.replica import OPENAI_HTTP, EngineProtocol

RUN_FILE = "run.sh"
METADATA_FILE = "metadata.json"
PRIVATE = ".enginehouse"  # holds all our files in a backends directory: LocalAI ignores directories without a run file
# LocalAI's names for new and replaced trees. We create none, but a directory may contain them.
BACKUPS = (".install-backup", ".backup")
SUFFIXES = (".install-tmp", ".upgrade-tmp", *BACKUPS)

# The steps of an install. `staged`: complete, perhaps in place, but not confirmed on disk; `swapped`: all on disk.
# After a crash of the machine an install is undone before `swapped` and finished from there on. `undoing`: the disk
# refused it.
SwapStep = Literal["fetching", "verified", "staged", "undoing", "swapped", "cleaned"]


class Metadata(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """LocalAI's keys, then ours."""

    name: str = ""
    alias: str = ""
    meta_backend_for: str = ""
    gallery_url: str = ""
    installed_at: str = ""
    version: str = ""
    uri: str = ""
    digest: str = ""
    # Additive.
    generation: int = 0
    protocol: EngineProtocol | Literal[""] = ""  # what the process speaks; "" if nobody said it
    platform: str = ""
    index_digest: str = ""  # of the image index that contained the build
    fetched_from: str = ""  # the actual source of the bytes, if it was not `uri`


class Version(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One tree on disk, identified by its inode, which survives a rename."""

    inode: int
    digest: str = ""
    blobs: tuple[str, ...] = ()  # its layers, kept for the next version


class InstallRecord(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What the worker must know about a directory after a crash. Written before the step that relies on it."""

    step: SwapStep
    attempt_inode: int = 0  # of the tree being installed
    # The boot whose page cache holds unsynced data; "" if everything was synced before.
    boot_id: str = ""
    pointer: Metadata | None = None  # the pointer that the meta name must get
    pointer_before: Metadata | None = None  # the previous pointer of that name
    versions: tuple[Version, ...] = ()


class Found(Struct, frozen=True, kw_only=True):
    """One directory as the worker saw it. `metadata` is None if there is no file, empty if it cannot be read."""

    name: str
    metadata: bytes | None
    has_run_file: bool  # exists, is not empty and is executable
    is_unsettled: bool = False  # its sync to disk was not confirmed
    previous: Metadata | None = None  # of the version that was kept


def check_directory(name: str) -> str:
    """Return `name` if a backend may use it as a directory: a valid name that no replacement uses."""
    check_name(name, "backend")
    if name.endswith(SUFFIXES):
        raise Invalid(
            f"cannot use {name!r} as a backend name: names ending in {', '.join(SUFFIXES)} are used while installing",
            code="invalid_name",
            param="name",
        )
    return name


def target_of(name: str) -> tuple[str, str] | None:
    """The backend and the suffix, if `name` is a directory of a replacement; else None."""
    for suffix in SUFFIXES:
        if name.endswith(suffix) and len(name) > len(suffix):
            return name.removesuffix(suffix), suffix
    return None


def metadata_for(resolved: Resolved, generation: int, installed_at: str) -> Metadata:
    return Metadata(
        name=resolved.directory,
        alias=resolved.alias,
        gallery_url=resolved.gallery_url or resolved.source,
        installed_at=installed_at,
        version=resolved.version,
        uri=resolved.uri,
        digest=resolved.digest,
        generation=generation,
        # An image or archive of unknown protocol is asked at its start; nearly all are LocalAI's and speak its gRPC.
        protocol=resolved.protocol or (OPENAI_HTTP if resolved.launcher else ""),
        platform=resolved.platform,
    )


def pointer_for(resolved: Resolved, installed_at: str) -> Metadata:
    """The metadata of the meta name that points to `resolved`."""
    return Metadata(
        name=resolved.meta,
        meta_backend_for=resolved.directory,
        gallery_url=resolved.gallery_url or resolved.source,
        installed_at=installed_at,
        version=resolved.version,
    )


def is_wanted(known: Metadata, resolved: Resolved, upgrade: bool) -> bool:
    """Whether the installed version is the requested one, as far as can be decided without the network."""
    if resolved.digest:
        return resolved.digest in (known.digest, known.index_digest)
    if resolved.sha256:
        return known.digest == "sha256:" + resolved.sha256.strip().lower().removeprefix("sha256:")
    return not upgrade and known.uri == resolved.uri and parse_uri(resolved.uri).kind != "directory"


def is_wanted_exactly(known: Metadata, resolved: Resolved) -> bool:
    """Whether a version is the requested one by its digest alone."""
    return bool(resolved.digest) and resolved.digest in (known.digest, known.index_digest)


def described_by(metadata: Metadata, artifact: Artifact) -> Metadata:
    """Return `metadata` completed from its artifact."""
    return msgspec.structs.replace(
        metadata,
        digest=artifact.digest,
        index_digest=artifact.index_digest if artifact.index_digest != artifact.digest else "",
        platform=artifact.platform or metadata.platform,
    )


def encode_metadata(metadata: Metadata) -> bytes:
    return msgspec.json.format(msgspec.json.encode(metadata), indent=2) + b"\n"


def decode_metadata(content: bytes) -> Metadata | None:
    """Return None for unreadable content: the directory then counts as broken."""
    try:
        return msgspec.json.decode(content, type=Metadata)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def listing(found: Iterable[Found], system: Iterable[Found] = ()) -> tuple[InstalledBackend, ...]:
    """The backends of a worker, by name. Directories of a replacement and empty ones are omitted.

    A system backend is listed unless one of the same name is installed, which then takes precedence.
    """
    directories = [one for one in found if target_of(one.name) is None]
    names = {one.name for one in directories}
    beside = [one for one in system if one.has_run_file and one.name not in names]
    runnable = {one.name for one in (*directories, *beside) if one.has_run_file}
    listed = [InstalledBackend(name=one.name, is_system=True, is_meta=False) for one in beside]
    for one in directories:
        metadata = decode_metadata(one.metadata) if one.metadata is not None else None
        if one.metadata is None and not one.has_run_file:
            continue
        known = metadata or Metadata()
        is_meta = bool(known.meta_backend_for) and not one.has_run_file
        works = known.meta_backend_for in runnable if is_meta else one.has_run_file
        listed.append(
            InstalledBackend(
                name=one.name,
                is_system=False,
                is_meta=is_meta,
                installed_at=known.installed_at,
                gallery_url=known.gallery_url,
                version=known.version,
                uri=known.uri,
                digest=known.digest,
                meta_backend_for=known.meta_backend_for if is_meta else "",
                generation=known.generation,
                is_broken=not works or (one.metadata is not None and metadata is None),
                is_unsettled=one.is_unsettled,
                previous_digest=one.previous.digest if one.previous is not None else "",
                previous_version=one.previous.version if one.previous is not None else "",
            )
        )
    return tuple(sorted(listed, key=lambda backend: backend.name))


def directory_behind(backends: Iterable[InstalledBackend], name: str) -> str | None:
    """The concrete directory behind a directory or meta name; None for an unknown name."""
    for backend in backends:
        if backend.name == name:
            return backend.meta_backend_for if backend.is_meta else backend.name
    return None
