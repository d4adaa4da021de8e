"""Resolution of an index or a manifest to the artifact of one platform.

Common to registries, layout directories and tars, which differ only in how a document is read: `Documents`.
All documents below the first one are read by digest and checked against it.
"""

from __future__ import annotations

from typing import Protocol

from enginehouse.core.artifact import Artifact
from enginehouse.core.errors import Hopeless
from enginehouse.fetch.oci.manifests import (
    MANIFESTS,
    MAX_DEPTH,
    MAX_DOCUMENT_BYTES,
    Configuration,
    Descriptor,
    Parsed,
    Platform,
    check_digest,
    has_configuration,
    layers_of,
    parse,
    parse_configuration,
)

_ATTESTATION = "vnd.docker.reference.type"


class Documents(Protocol):
    """A source of documents."""

    async def manifest(self, descriptor: Descriptor) -> tuple[bytes, str]:
        """Return the bytes of an index or manifest, and the media type it was sent with ("" if unknown)."""

    async def configuration(self, descriptor: Descriptor) -> bytes: ...


async def artifact_of(root: Parsed, blobs: Documents, *, platform: str, uri: str) -> Artifact:
    """Return the artifact that `root`, an index or a manifest, has for `platform`.

    Raises `Hopeless` with `unsupported_platform` if there is none. LocalAI's workers do not report a platform; with
    an empty one, `root` must be a manifest and no child is chosen.
    """
    offered: list[str] = []
    manifest, is_stated = root, not platform
    if root.kind == "index":
        if not platform:
            raise Hopeless(
                f"cannot choose from {uri}: it has one build per platform, and the platform of the node is unknown",
                code="unsupported_platform",
            )
        found = await _search(root, blobs, platform, offered, 1, uri)
        if found is None:
            raise unsupported(uri, platform, offered)
        manifest, is_stated = found
    configuration: Configuration | None = None
    if has_configuration(manifest):
        assert manifest.config is not None
        configuration = parse_configuration(await _checked(blobs, manifest.config, uri), uri)
    # An index states the platform of each child. A manifest alone does not, and a build for another platform would
    # install without an error and fail at its start.
    if configuration is not None and not is_stated:
        claimed = Platform(configuration.os, configuration.architecture, configuration.variant)
        if claimed.os and claimed.architecture and not matches(claimed, platform):
            raise unsupported(uri, platform, [str(claimed)])
    return Artifact(
        uri=uri,
        digest=manifest.digest,
        index_digest=root.digest if root.kind == "index" else "",
        platform=platform,
        layers=layers_of(manifest, configuration, uri),
    )


def matches(offered: Platform, wanted: str) -> bool:
    """Whether `offered` satisfies `wanted`. Variants are compared only if `wanted` has one: arm64 equals arm64/v8."""
    system, architecture, *variant = wanted.split("/")
    same = (offered.os, offered.architecture) == (system, architecture)
    return same and (not variant or variant[0] == offered.variant)


def unsupported(uri: str, wanted: str, offered: list[str]) -> Hopeless:
    available = ", ".join(dict.fromkeys(offered)) or "no image"
    return Hopeless(
        f"cannot install {uri}: it is needed for {wanted}, but the source has {available}", code="unsupported_platform"
    )


async def _search(
    index: Parsed, blobs: Documents, wanted: str, offered: list[str], depth: int, uri: str
) -> tuple[Parsed, bool] | None:
    """Return the first matching manifest, and whether the index states its platform. Nested indexes come last.

    Cycles are impossible: a document cannot contain its own digest, and each child is checked against its digest.
    """
    children = [child for child in index.children if not is_attestation(child)]
    for child in children:
        if child.media_type not in ("", *MANIFESTS):
            continue
        # LocalAI's default for an entry without a platform.
        platform = child.platform or Platform("linux", "amd64")
        offered.append(str(platform))
        if matches(platform, wanted):
            return await _child(child, blobs, uri), child.platform is not None
    for child in children:
        if not child.is_index or (child.platform is not None and not matches(child.platform, wanted)):
            continue
        if depth >= MAX_DEPTH:
            raise Hopeless(
                f"cannot use {uri}: its indexes are nested more than {MAX_DEPTH} deep", code="unsafe_archive"
            )
        inner = await _child(child, blobs, uri)
        if found := await _search(inner, blobs, wanted, offered, depth + 1, uri):
            return found
    return None


async def _child(descriptor: Descriptor, blobs: Documents, uri: str) -> Parsed:
    content, sent_as = await blobs.manifest(descriptor)
    parsed = parse(content, media_type=sent_as or descriptor.media_type, digest=descriptor.digest, what=uri)
    if descriptor.media_type and parsed.media_type != descriptor.media_type:
        raise Hopeless(
            f"cannot use {uri}: its index lists {descriptor.media_type!r}, but the content is {parsed.media_type!r}",
            code="unsafe_archive",
        )
    return parsed


async def _checked(blobs: Documents, descriptor: Descriptor, uri: str) -> bytes:
    if descriptor.size > MAX_DOCUMENT_BYTES:
        raise Hopeless(
            f"cannot use {uri}: its configuration has {descriptor.size} bytes; the limit is {MAX_DOCUMENT_BYTES}",
            code="archive_too_large",
        )
    content = await blobs.configuration(descriptor)
    check_digest(content, descriptor.digest, f"the configuration of {uri}")
    return content


def is_attestation(child: Descriptor) -> bool:
    platform = child.platform
    is_unknown = platform is not None and (platform.os, platform.architecture) == ("unknown", "unknown")
    return is_unknown or _ATTESTATION in (child.annotations or {})
