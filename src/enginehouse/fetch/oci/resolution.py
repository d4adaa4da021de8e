"""From a document to the artifact of one platform: which child of an index, which layers.

The same for registries, layout directories and tars, which differ only in how a blob's bytes are had: `Documents`.
Everything below the first document is asked for by digest and checked against it.
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
    """Where documents come from."""

    async def manifest(self, descriptor: Descriptor) -> tuple[bytes, str]:
        """The bytes of an index or manifest, and the media type it was sent with ("" where there is none)."""

    async def configuration(self, descriptor: Descriptor) -> bytes: ...


async def artifact_of(root: Parsed, blobs: Documents, *, platform: str, uri: str) -> Artifact:
    """What `root`, an index or a manifest, holds for `platform`; raises `unsupported_platform` if it is nothing.

    Without a platform, as LocalAI's workers do not tell theirs, a manifest alone is meant and no child is chosen.
    """
    offered: list[str] = []
    manifest, is_told = root, not platform
    if root.kind == "index":
        if not platform:
            raise Hopeless(
                f"cannot choose from {uri}: it has a build per platform, and that of the node is not known",
                code="unsupported_platform",
            )
        found = await _search(root, blobs, platform, offered, 1, uri)
        if found is None:
            raise unsupported(uri, platform, offered)
        manifest, is_told = found
    configuration: Configuration | None = None
    if has_configuration(manifest):
        assert manifest.config is not None
        configuration = parse_configuration(await _checked(blobs, manifest.config, uri), uri)
    # An index has said for which platform this is; a manifest alone has not, and a build for another machine would
    # install well and fail when it is started.
    if configuration is not None and not is_told:
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
    """Variants count only where one is wanted: arm64 is arm64 whether or not somebody wrote v8."""
    system, architecture, *variant = wanted.split("/")
    same = (offered.os, offered.architecture) == (system, architecture)
    return same and (not variant or variant[0] == offered.variant)


def unsupported(uri: str, wanted: str, offered: list[str]) -> Hopeless:
    there_is = ", ".join(dict.fromkeys(offered)) or "nothing that is an image"
    return Hopeless(
        f"cannot install {uri} here: it is wanted for {wanted}, and there is {there_is}", code="unsupported_platform"
    )


async def _search(
    index: Parsed, blobs: Documents, wanted: str, offered: list[str], depth: int, uri: str
) -> tuple[Parsed, bool] | None:
    """The first manifest that fits, and whether its platform was told; indexes inside are looked into afterwards.

    An index cannot hold its own digest, so one that is sent as its own child fails for its digest.
    """
    children = [child for child in index.children if not is_attestation(child)]
    for child in children:
        if child.media_type not in ("", *MANIFESTS):
            continue
        # As LocalAI reads an entry that does not say what it is for.
        platform = child.platform or Platform("linux", "amd64")
        offered.append(str(platform))
        if matches(platform, wanted):
            return await _child(child, blobs, uri), child.platform is not None
    for child in children:
        if not child.is_index or (child.platform is not None and not matches(child.platform, wanted)):
            continue
        if depth >= MAX_DEPTH:
            raise Hopeless(f"cannot use {uri}: more than {MAX_DEPTH} indexes in each other", code="unsafe_archive")
        inner = await _child(child, blobs, uri)
        if found := await _search(inner, blobs, wanted, offered, depth + 1, uri):
            return found
    return None


async def _child(descriptor: Descriptor, blobs: Documents, uri: str) -> Parsed:
    content, sent_as = await blobs.manifest(descriptor)
    parsed = parse(content, media_type=sent_as or descriptor.media_type, digest=descriptor.digest, what=uri)
    if descriptor.media_type and parsed.media_type != descriptor.media_type:
        raise Hopeless(
            f"cannot use {uri}: its index tells of a {descriptor.media_type!r} and there is a {parsed.media_type!r}",
            code="unsafe_archive",
        )
    return parsed


async def _checked(blobs: Documents, descriptor: Descriptor, uri: str) -> bytes:
    if descriptor.size > MAX_DOCUMENT_BYTES:
        raise Hopeless(
            f"cannot use {uri}: its configuration has {descriptor.size} bytes, more than {MAX_DOCUMENT_BYTES}",
            code="archive_too_large",
        )
    content = await blobs.configuration(descriptor)
    check_digest(content, descriptor.digest, f"the configuration of {uri}")
    return content


def is_attestation(child: Descriptor) -> bool:
    platform = child.platform
    is_unknown = platform is not None and (platform.os, platform.architecture) == ("unknown", "unknown")
    return is_unknown or _ATTESTATION in (child.annotations or {})
