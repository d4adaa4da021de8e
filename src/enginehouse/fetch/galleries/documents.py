"""Gallery documents: YAML parsed under hard limits, entries validated one by one.

The only module that imports YAML. Values are built from the events of the C parser and counted during parsing, so a
document whose aliases would expand beyond the limit is refused before the expansion. All plain values stay text (the
version `1.10` does not become the number 1.1); dates, octal numbers and tags are not interpreted. An invalid entry is
skipped and does not affect the others.
"""

from __future__ import annotations

import logging
import re
import time
from typing import Any, TypeVar

import msgspec
import yaml

from enginehouse.core.errors import EnginehouseError, Invalid
from enginehouse.core.gallery_entry import GalleryEntry, Skipped
from enginehouse.core.model import Model
from enginehouse.core.name import check_model_name, check_name

log = logging.getLogger(__name__)

MAX_DOCUMENT_BYTES = 5 * 1024 * 1024  # ten times the largest known gallery
MAX_NODES = 100_000  # keys, values, lists and maps; an alias counts as its expansion
MAX_DEPTH = 32  # a gallery has four levels
LIMIT_SECONDS = 2.0
MAX_URI = 2048
_LOGGED = 20  # skipped entries logged by name; the state of the gallery lists all
_CHECK_TIME_EVERY = 1024  # events; reading the clock costs as much as parsing one
_TAGS = {f"tag:yaml.org,2002:{word}" for word in ("null", "bool", "int", "float", "str", "seq", "map", "merge")}
_NULL_TAG = "tag:yaml.org,2002:null"
_NULL = ("", "~", "null", "Null", "NULL")

T = TypeVar("T", GalleryEntry, Model)


class _Frame:
    """An open list or map. `target` receives the values; `before` is the number of nodes at its start."""

    __slots__ = ("anchor", "before", "key", "merged", "target")

    def __init__(self, target: list[Any] | dict[str, Any], anchor: str | None, before: int) -> None:
        self.target = target
        self.anchor = anchor
        self.before = before
        self.key: str | None = None
        self.merged: list[Any] = []


class _Refused(Exception):
    """The reason why a document is refused."""


class _Builder:
    """Builds the value of one document from its events."""

    def __init__(self) -> None:
        self.root: Any = None
        self._nodes = 0
        self._stack: list[_Frame] = []
        self._anchors: dict[str, tuple[Any, int]] = {}  # value and number of nodes

    def take(self, event: Any) -> None:
        match event:
            case yaml.ScalarEvent():
                self._count(1, event)
                self._scalar(event)
            case yaml.AliasEvent():
                known = self._anchors.get(event.anchor or "")
                if known is None:
                    raise _Refused(f"the alias *{event.anchor} has no complete anchor before it{_place(event)}")
                self._count(known[1], event)
                self._put(known[0], event)
            case yaml.SequenceStartEvent():
                self._open([], event)
            case yaml.MappingStartEvent():
                self._open({}, event)
            case yaml.SequenceEndEvent() | yaml.MappingEndEvent():
                self._close(event)

    def _count(self, nodes: int, event: Any) -> None:
        self._nodes += nodes
        if self._nodes > MAX_NODES:
            raise _Refused(f"it has more than {MAX_NODES} values with aliases expanded{_place(event)}")

    def _scalar(self, event: Any) -> None:
        self._check_tag(event)
        value: str | None = event.value
        frame = self._stack[-1] if self._stack else None
        if frame is not None and isinstance(frame.target, dict) and frame.key is None:
            if event.value in frame.target or (event.value == "<<" and frame.merged):
                raise _Refused(f"the key {event.value[:40]!r} occurs twice{_place(event)}")
            frame.key = event.value
            return
        is_plain = event.tag is None and event.implicit[0]
        if event.tag == _NULL_TAG or (is_plain and event.value in _NULL):
            value = None
        if event.anchor:
            self._anchors[event.anchor] = (value, 1)
        self._put(value, event)

    def _open(self, target: list[Any] | dict[str, Any], event: Any) -> None:
        self._check_tag(event)
        if self._stack and isinstance(self._stack[-1].target, dict) and self._stack[-1].key is None:
            raise _Refused(f"a key must be plain text{_place(event)}")
        if len(self._stack) >= MAX_DEPTH:
            raise _Refused(f"lists and maps are nested more than {MAX_DEPTH} deep{_place(event)}")
        before = self._nodes
        self._count(1, event)
        if event.anchor:
            # The anchor is registered when the value is complete, so that a value cannot contain itself.
            self._anchors.pop(event.anchor, None)
        self._stack.append(_Frame(target, event.anchor, before))

    def _close(self, event: Any) -> None:
        frame = self._stack.pop()
        if isinstance(frame.target, dict):
            for merged in frame.merged:
                for key, value in merged.items():
                    frame.target.setdefault(key, value)
        if frame.anchor:
            self._anchors[frame.anchor] = (frame.target, self._nodes - frame.before)
        self._put(frame.target, event)

    def _put(self, value: Any, event: Any) -> None:
        if not self._stack:
            self.root = value
            return
        frame = self._stack[-1]
        if isinstance(frame.target, list):
            frame.target.append(value)
        elif frame.key is None:
            raise _Refused(f"a key must be plain text{_place(event)}")
        elif frame.key == "<<":
            frame.merged = value if isinstance(value, list) else [value]
            frame.key = None
            if not frame.merged or not all(isinstance(one, dict) for one in frame.merged):
                raise _Refused(f"only maps can be merged{_place(event)}")
        else:
            frame.target[frame.key] = value
            frame.key = None

    @staticmethod
    def _check_tag(event: Any) -> None:
        if event.tag is not None and event.tag not in _TAGS and event.tag != "!":
            raise _Refused(f"the tag {event.tag[:60]!r} is not allowed{_place(event)}")


def _place(event: Any) -> str:
    return f" (line {event.start_mark.line + 1})"


def read_list(document: bytes, gallery: str) -> list[Any]:
    """Parse a document that is a list. Raises `Invalid` with the reason. Blocks for at most two seconds."""
    try:
        return _read_list(document)
    except (_Refused, yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise Invalid(f"cannot read the gallery {gallery}: {reason}", code="unsupported") from error


def _read_list(document: bytes) -> list[Any]:
    if len(document) > MAX_DOCUMENT_BYTES:
        raise _Refused(f"it has {len(document)} bytes; the limit is {MAX_DOCUMENT_BYTES}")
    text = document.decode("utf-8")
    if "\x00" in text:
        raise _Refused("it contains a NUL character")
    builder = _Builder()
    deadline = time.monotonic() + LIMIT_SECONDS
    documents = 0
    for number, event in enumerate(yaml.parse(text, Loader=yaml.CSafeLoader)):
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
        if documents > 1:
            raise _Refused("it contains more than one document")
        builder.take(event)
        if number % _CHECK_TIME_EVERY == 0 and time.monotonic() > deadline:
            raise _Refused(f"parsing it takes more than {LIMIT_SECONDS:.0f} s")
    if builder.root is None:
        return []
    if not isinstance(builder.root, list):
        raise _Refused("it must be a list of entries")
    return builder.root


def read_backends(document: bytes, gallery: str) -> tuple[tuple[GalleryEntry, ...], tuple[Skipped, ...]]:
    """Return the valid entries and the skipped ones."""
    return _entries(document, gallery, GalleryEntry)


def parse_backends(document: bytes, gallery: str) -> tuple[GalleryEntry, ...]:
    return read_backends(document, gallery)[0]


def parse_models(document: bytes, gallery: str) -> tuple[Model, ...]:
    return _entries(document, gallery, Model)[0]


def _entries(document: bytes, gallery: str, kind: type[T]) -> tuple[tuple[T, ...], tuple[Skipped, ...]]:
    found: list[T] = []
    skipped: list[Skipped] = []
    for position, item in enumerate(read_list(document, gallery)):
        try:
            found.append(_checked(msgspec.convert(_without_nulls(item), kind, strict=False)))
        except (msgspec.ValidationError, EnginehouseError) as error:
            named = item.get("name") if isinstance(item, dict) else None
            name = named[:60] if isinstance(named, str) else f"#{position + 1}"
            skipped.append(Skipped(name, str(error)))
            if len(skipped) <= _LOGGED:
                log.warning("gallery.entry_skipped gallery=%s entry=%r error=%s", gallery, name, error)
    if len(skipped) > _LOGGED:
        log.warning("gallery.entries_skipped gallery=%s entries=%d", gallery, len(skipped))
    return tuple(found), tuple(skipped)


def _without_nulls(item: Any) -> Any:
    """Drop keys without a value; as in LocalAI, they count as missing."""
    return {key: value for key, value in item.items() if value is not None} if isinstance(item, dict) else item


def _checked(entry: T) -> T:
    if isinstance(entry, Model):
        check_model_name(entry.name)
        return entry
    for name in (entry.name, entry.alias or entry.name, *entry.capabilities.values()):
        check_name(name, "backend")
    for uri in (entry.uri, *entry.mirrors):
        if len(uri) > MAX_URI or not uri.isprintable() or " " in uri:
            raise Invalid(f"cannot use its uri: it has more than {MAX_URI} characters, or spaces or control characters")
    if entry.sha256 and not re.fullmatch(r"(sha256:)?[0-9a-fA-F]{64}", entry.sha256):
        raise Invalid("cannot use its sha256: it must be 64 hexadecimal digits")
    return entry
