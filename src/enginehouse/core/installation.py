"""Backends on disk: LocalAI's `metadata.json`, the names beside a directory while it is replaced, the listing.

Pure: the worker reads the directories and hands in what it found. A directory that cannot be understood is skipped or
shown as broken; it never hides the others.
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

RUN_FILE = "run.sh"
METADATA_FILE = "metadata.json"
PRIVATE = ".enginehouse"  # everything of ours in a backends directory: LocalAI lists no directory without a run file
# LocalAI's names for what it builds and what it replaces: we make none, but a directory may come from there.
BACKUPS = (".install-backup", ".backup")
SUFFIXES = (".install-tmp", ".upgrade-tmp", *BACKUPS)

# How far an install is. `staged`: complete, perhaps in place, but only `swapped` says that it is all on disk. Before
# that it is undone when the machine stopped meanwhile, from there on it is finished. `undoing`: the disk refused it.
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
    protocol: str = ""  # how the process is talked to: "openai-http", or "" for LocalAI's gRPC
    platform: str = ""
    index_digest: str = ""  # of the image index the build was taken from
    fetched_from: str = ""  # where the bytes really came from, when it was not `uri`


class Version(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One tree on disk, known by its inode: that stays the same when the tree is renamed."""

    inode: int
    digest: str = ""
    blobs: tuple[str, ...] = ()  # what it was made of: kept for the next version


class InstallRecord(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What the worker has to know of a directory after a crash. On disk before the step that relies on it."""

    step: SwapStep
    attempt_inode: int = 0  # of the tree being installed
    # The run of the machine whose memory holds what is not yet on disk; empty when all of it was synced before.
    boot_id: str = ""
    pointer: Metadata | None = None  # of the meta name that has to lead to it
    pointer_before: Metadata | None = None  # what that name led to
    versions: tuple[Version, ...] = ()


class Found(Struct, frozen=True, kw_only=True):
    """One directory as the worker saw it. `metadata` is None when there is no file, empty when it cannot be read."""

    name: str
    metadata: bytes | None
    has_run_file: bool  # one that could be started: there, not empty, executable
    is_unsettled: bool = False  # its sync was not seen to end


def check_directory(name: str) -> str:
    """`name` itself, if a backend may live in it: a good name that no other backend uses while it is replaced."""
    check_name(name, "backend")
    if name.endswith(SUFFIXES):
        raise Invalid(
            f"cannot use {name!r} as a backend name: names ending in {', '.join(SUFFIXES)} are used while installing",
            code="invalid_name",
            param="name",
        )
    return name


def target_of(name: str) -> tuple[str, str] | None:
    """The backend and the suffix, for the name of a directory that belongs to a replacement; else None."""
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
        # Images are LocalAI's, and speak its gRPC; what we make of a package with a launcher of ours speaks OpenAI.
        protocol="openai-http" if resolved.launcher else "",
        platform=resolved.platform,
    )


def pointer_for(resolved: Resolved, installed_at: str) -> Metadata:
    """The metadata of the meta name that leads to `resolved`."""
    return Metadata(
        name=resolved.meta,
        meta_backend_for=resolved.directory,
        gallery_url=resolved.gallery_url or resolved.source,
        installed_at=installed_at,
        version=resolved.version,
    )


def is_wanted(known: Metadata, resolved: Resolved, upgrade: bool) -> bool:
    """Whether what is installed is what is asked for, as far as can be told without asking anybody."""
    if resolved.digest:
        return resolved.digest in (known.digest, known.index_digest)
    if resolved.sha256:
        return known.digest == "sha256:" + resolved.sha256.strip().lower().removeprefix("sha256:")
    return not upgrade and known.uri == resolved.uri and parse_uri(resolved.uri).kind != "directory"


def is_same(known: Metadata, artifact: Artifact) -> bool:
    # LocalAI records the digest of the index, we that of the platform's manifest.
    return bool(known.digest) and known.digest in (artifact.digest, artifact.index_digest)


def described_by(metadata: Metadata, artifact: Artifact) -> Metadata:
    """`metadata` with what its artifact says of itself."""
    return msgspec.structs.replace(
        metadata,
        digest=artifact.digest,
        index_digest=artifact.index_digest if artifact.index_digest != artifact.digest else "",
        platform=artifact.platform or metadata.platform,
    )


def encode_metadata(metadata: Metadata) -> bytes:
    return msgspec.json.format(msgspec.json.encode(metadata), indent=2) + b"\n"


def decode_metadata(content: bytes) -> Metadata | None:
    """None for what cannot be read: whoever asks treats the directory as broken."""
    try:
        return msgspec.json.decode(content, type=Metadata)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def listing(found: Iterable[Found], system: Iterable[Found] = ()) -> tuple[InstalledBackend, ...]:
    """What a worker says it has, by name. Directories of a replacement, and those that hold nothing, are left out.

    A backend of the system is listed unless one of the same name was installed, which is then the one that runs.
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
            )
        )
    return tuple(sorted(listed, key=lambda backend: backend.name))


def directory_behind(backends: Iterable[InstalledBackend], name: str) -> str | None:
    """The concrete directory that a directory or meta name leads to; None for an unknown name."""
    for backend in backends:
        if backend.name == name:
            return backend.meta_backend_for if backend.is_meta else backend.name
    return None
