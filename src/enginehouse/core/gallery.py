"""The choice of a concrete build for one machine, over several galleries.

Of two entries with the same name the first one wins, within a gallery and between galleries. A choice lists every step
that led to it, a refusal every reason. The key for exactly this capability is trusted. A general key, and a build
requested by its own name, are checked for builds that clearly cannot run on the machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
from msgspec import Struct

from enginehouse.core.backend import Resolved, package_digest
from enginehouse.core.capability import (
    DISABLED,
    GENERAL,
    graphics_of,
    is_for_processors,
    keys_for,
    preferred_words,
    too_new,
    why_unsuitable,
)
from enginehouse.core.errors import Hopeless, NotFound, Unavailable
from enginehouse.core.gallery_entry import Gallery, GalleryEntry
from enginehouse.core.model import Model

EXPECTED_SECONDS = 2.0  # an index of a thousand entries is loaded within this time

GalleryPlace = tuple[Gallery, GalleryEntry]


class Choice(Struct, frozen=True, kw_only=True):
    """The build for a machine, and how it was found."""

    resolved: Resolved
    entry: GalleryEntry
    gallery: str
    reasons: tuple[str, ...]


class Catalogue:
    """Several galleries, indexed by name; lookups ignore case, as LocalAI's do."""

    def __init__(self, galleries: Iterable[Gallery]) -> None:
        self.galleries = tuple(galleries)
        self._by_name: dict[str, list[GalleryPlace]] = {}
        self._by_alias: dict[str, list[GalleryPlace]] = {}
        for gallery in self.galleries:
            for entry in gallery.backends:
                self._by_name.setdefault(entry.name.lower(), []).append((gallery, entry))
                if entry.alias and entry.uri:
                    self._by_alias.setdefault(entry.alias.lower(), []).append((gallery, entry))

    def entries(self) -> Iterator[GalleryPlace]:
        """Every entry that can be chosen: of two with the same name in one gallery, the first."""
        for gallery in self.galleries:
            seen: set[str] = set()
            for entry in gallery.backends:
                if entry.name.lower() not in seen:
                    seen.add(entry.name.lower())
                    yield gallery, entry

    def variants(self) -> set[str]:
        """The names that some meta entry points to. Lists of installable backends show the meta entry instead."""
        return {
            target
            for gallery in self.galleries
            for entry in gallery.backends
            if entry.is_meta
            for target in entry.capabilities.values()
        }

    def find(self, name: str) -> GalleryPlace:
        """Find an entry by `name` or `gallery@name`; raise `NotFound` if no gallery has it. Aliases do not count."""
        found = self._found(name, self._by_name)
        if not found:
            raise self._unknown(name)
        return found[0]

    def builds(self, name: str) -> list[GalleryPlace]:
        """The candidates for a name before a machine is known: its entry, or the builds with that alias."""
        found = self._found(name, self._by_name)[:1] or self._found(name, self._by_alias)
        if not found:
            raise self._unknown(name)
        return found

    def target(self, gallery: Gallery, name: str) -> GalleryPlace | None:
        """The target of a meta entry: from its own gallery, else from the first gallery that has it."""
        found = self._by_name.get(name.lower(), [])
        return next((one for one in found if one[0].name == gallery.name), found[0] if found else None)

    def explain(self, name: str, capability: str, platform: str) -> Choice:
        """The concrete build of `name` for a machine.

        Raises `NotFound` if no gallery has the name, `Unavailable` while a gallery that may have it is still loading,
        and `Hopeless` (`unsupported`, `unsupported_platform`) with every reason if none of its builds fits.
        """
        found = self.builds(name)
        search = _Search(self, capability, platform)
        chosen = search.choose(name.rpartition("@")[2].lower(), found)
        if chosen is None:
            raise self._refused(name, found[0][0], search)
        remark = self._unused_graphics(name, chosen, capability, platform)
        if not remark:
            return chosen
        resolved = msgspec.structs.replace(chosen.resolved, remark=remark)
        return msgspec.structs.replace(chosen, resolved=resolved, reasons=(*chosen.reasons, remark))

    def _unused_graphics(self, name: str, chosen: Choice, capability: str, platform: str) -> str:
        """One line for a machine whose graphics cards the chosen build does not use: where there is one that does.

        It is not taken by itself: it may be a hundred times larger, and the first answer is to come within seconds.
        """
        vendor, build = graphics_of(capability), chosen.resolved
        if not vendor or "@" in name or not is_for_processors(build.directory, build.uri):
            return ""
        for gallery, _ in self._by_name.get(name.lower(), ()):
            if gallery.name == chosen.gallery:
                continue
            search = _Search(self, capability, platform)
            found = search.choose(name.lower(), self._found(f"{gallery.name}@{name}", self._by_name))
            if found is not None and not is_for_processors(found.resolved.directory, found.resolved.uri):
                command = f"enginehouse backends install {gallery.name}@{name}"
                return f"it computes on the processor; for the {vendor} graphics: {command}"
        is_chosen_for_machines = bool(build.meta)  # an entry without variants is what it is everywhere
        why = f"no gallery has a build of it for {vendor} graphics"
        return f"it computes on the processor: {why}" if is_chosen_for_machines else ""

    def _found(self, name: str, index: dict[str, list[GalleryPlace]]) -> list[GalleryPlace]:
        chosen, _, plain = name.rpartition("@")
        return [one for one in index.get(plain.lower(), ()) if not chosen or one[0].name == chosen]

    def _unknown(self, name: str) -> NotFound | Unavailable:
        chosen = name.rpartition("@")[0]
        names = [one.name for one in self.galleries]
        if chosen and chosen not in names:
            return NotFound(
                f"cannot find a gallery named {chosen!r}. Known galleries: {', '.join(names)}",
                code="not_found",
                param="backend",
            )
        missing = [one for one in self.galleries if one.problem and chosen in ("", one.name)]
        expected = [one.name for one in missing if one.is_expected]
        if expected:
            unread = Unavailable(
                f"cannot resolve {name!r} yet: the gallery {', '.join(expected)} is being fetched for the first "
                "time. Try again in a moment",
                code="gallery_loading",
                param="backend",
            )
            unread.retry_after_seconds = EXPECTED_SECONDS
            return unread
        problems = "".join(f"; the gallery {one.name} is not loaded: {one.problem}" for one in missing)
        return NotFound(
            f"cannot find a backend named {name!r} in any gallery. See `enginehouse backends available`, or without a "
            f"server `enginehouse gallery list --all`{problems}",
            code="not_found",
            param="backend",
        )

    def _refused(self, name: str, gallery: Gallery, search: _Search) -> Hopeless:
        hint = ""
        if "@" not in name:
            others = {one.name for one, _ in self._by_name.get(name.lower(), ())} - {gallery.name}
            hint = "".join(f"; {one}@{name} has the same name" for one in sorted(others))
        return Hopeless(
            f"cannot install {name}: {'; '.join(search.refusals)}{hint}",
            code="unsupported_platform" if search.is_platform_alone else "unsupported",
        )


class _Search:
    """One search for a machine: the candidates tried, and why each was refused."""

    def __init__(self, catalogue: Catalogue, capability: str, platform: str) -> None:
        self._catalogue = catalogue
        self._capability = capability
        self._platform = platform
        self.refusals: list[str] = []
        self.is_platform_alone = True

    def choose(self, plain: str, found: list[GalleryPlace]) -> Choice | None:
        gallery, entry = found[0]
        if entry.name.lower() != plain:
            for one in sorted(found, key=lambda place: _preference(place[1], self._capability)):
                build = one[1].name
                chosen = self._direct(*one, f"{plain} is an alias, {build} the best build that has it", f"{build}: ")
                if chosen is not None:
                    return chosen
            return None
        if entry.is_meta:
            return self._follow(gallery, entry, (entry.name,))
        return self._direct(gallery, entry, f"{entry.name} is a concrete build")

    def _follow(self, gallery: Gallery, meta: GalleryEntry, path: tuple[str, ...]) -> Choice | None:
        """Try the keys of a meta entry, best first, and follow those that lead to other meta entries."""
        keys = [key for key in keys_for(self._capability) if key in meta.capabilities]
        if not keys:
            offered = ", ".join(sorted(meta.capabilities))
            self._refuse(f"{meta.name} has builds for {offered}, none for {self._capability}")
        for key in keys:
            chosen = self._try(gallery, meta, key, path)
            if chosen is not None:
                return chosen
        return None

    def _try(self, gallery: Gallery, meta: GalleryEntry, key: str, path: tuple[str, ...]) -> Choice | None:
        target = meta.capabilities[key]
        step = f"{meta.name}: key {key} → {target}"
        found = self._catalogue.target(gallery, target)
        if found is None:
            return self._refuse(f"{step}, which is in no gallery")
        where, entry = found
        if entry.name in path:
            return self._refuse(f"{step}, which is a circular reference")
        if entry.is_meta:
            return self._follow(where, entry, (*path, entry.name))
        # The key for exactly this capability is trusted; a general one may mean another machine.
        reason = "" if key == self._capability else too_new(self._capability, entry.name, entry.uri)
        if key in GENERAL:
            reason = reason or self._misfit(entry)
        if reason:
            return self._refuse(f"{step}, and {reason}")
        return self._take(where, entry, f"capability {self._capability} → key {key} → {entry.name}", path[0])

    def _direct(self, gallery: Gallery, entry: GalleryEntry, step: str, prefix: str = "") -> Choice | None:
        reason = self._misfit(entry)
        if reason:
            return self._refuse(f"{prefix}{reason}")
        return self._take(gallery, entry, step, "")

    def _misfit(self, entry: GalleryEntry) -> str:
        reason = why_unsuitable(self._capability, entry.name, entry.uri)
        return reason and f"{reason} (force another capability, or {DISABLED!r}, to install it anyway)"

    def _take(self, gallery: Gallery, entry: GalleryEntry, step: str, meta: str) -> Choice | None:
        if entry.platforms and self._platform not in entry.platforms:
            offered = ", ".join(entry.platforms)
            return self._refuse(f"{entry.name} has builds for {offered}, none for {self._platform}", is_platform=True)
        if not entry.uri:
            return self._refuse(f"{entry.name} has neither a uri nor capabilities")
        if _is_local(entry.uri) and not _is_local(gallery.url):
            return self._refuse(f"{entry.name}: the gallery {gallery.name} is remote and may not name local files")
        if gallery.demands_signatures and _is_image(entry.uri):
            return self._refuse(
                f"{entry.name}: its gallery {gallery.name} requires signatures, which cannot be verified"
            )
        return Choice(
            resolved=_resolved(gallery, entry, self._platform, meta),
            entry=entry,
            gallery=gallery.name,
            reasons=(*self.refusals, step),
        )

    def _refuse(self, reason: str, *, is_platform: bool = False) -> Choice | None:
        """Record the reason. Always None, so that callers can return it."""
        self.refusals.append(reason)
        self.is_platform_alone &= is_platform
        return None


def find_model(galleries: Iterable[Gallery], name: str) -> Model | None:
    for gallery in galleries:
        for model in gallery.models:
            if model.name == name:
                return model
    return None


def resolve(galleries: Iterable[Gallery], name: str, capability: str, platform: str) -> Resolved:
    return Catalogue(galleries).explain(name, capability, platform).resolved


def _resolved(gallery: Gallery, entry: GalleryEntry, platform: str, meta: str) -> Resolved:
    is_package = entry.uri.startswith("pypi:")
    return Resolved(
        directory=entry.name,
        uri=entry.uri,
        digest=package_digest(entry.uri, entry.requirements, entry.launcher, entry.version) if is_package else "",
        source=gallery.name,
        platform=platform,
        meta=meta,
        alias=entry.alias,
        version=entry.version,
        requirements=entry.requirements,
        launcher=entry.launcher,
        protocol=entry.protocol,
        size_bytes=entry.size_bytes,
        mirrors=tuple(one for one in entry.mirrors if _is_local(gallery.url) or not _is_local(one)),
        sha256=entry.sha256,
        gallery_url=gallery.url,
    )


def _preference(entry: GalleryEntry, capability: str) -> tuple[bool, int]:
    """Sort key for builds of one alias, best first; equal ones keep the order of their galleries."""
    words = preferred_words(capability)
    rank = next((place for place, word in enumerate(words) if word in entry.name.lower()), len(words))
    return entry.is_development, rank


def _is_local(uri: str) -> bool:
    """Whether the URI names local files of the machine that reads it, which only that machine's operator may do."""
    return uri.startswith(("/", "file:", "ocifile:"))


def _is_image(uri: str) -> bool:
    scheme, sign, _ = uri.partition("://")
    return scheme in ("oci", "ocifile") if sign else not uri.startswith(("pypi:", "/", "file:"))
