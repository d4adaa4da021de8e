"""Gallery documents: YAML parsed under hard limits, entries validated one by one.

The only module that imports YAML. Values are built from the events of the C parser and counted during parsing, so a
document whose aliases would expand beyond the limit is refused before the expansion. In galleries of backends all plain
values stay text (the version `1.10` does not become the number 1.1); configurations of models have numbers and booleans
(`read_mappings`). Dates and tags are not interpreted. An invalid entry is skipped and does not affect the others.
"""

from __future__ import annotations

import logging
import re
import time
from math import isfinite
from typing import Any, TypeVar

import msgspec
import yaml
from msgspec import Struct

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

_BOOLEANS = {word: word.lower() == "true" for word in ("true", "True", "TRUE", "false", "False", "FALSE")}
_WHOLE = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,17})")
_HEXADECIMAL = re.compile(r"0x[0-9a-fA-F]{1,15}")
_FRACTION = re.compile(r"[-+]?(?:[0-9]{1,30}\.[0-9]{0,30}|\.[0-9]{1,30}|[0-9]{1,30}(?=[eE]))(?:[eE][-+]?[0-9]{1,3})?")

T = TypeVar("T", GalleryEntry, Model)


class YamlLimits(Struct, frozen=True):
    nodes: int = MAX_NODES
    seconds: float = LIMIT_SECONDS


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

    def __init__(self, limits: YamlLimits, *, is_typed: bool) -> None:
        self.root: Any = None
        self._nodes = 0
        self._limits = limits
        self._is_typed = is_typed
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
        if self._nodes > self._limits.nodes:
            raise _Refused(f"it has more than {self._limits.nodes} values with aliases expanded{_place(event)}")

    def _scalar(self, event: Any) -> None:
        self._check_tag(event)
        value: Any = event.value
        frame = self._stack[-1] if self._stack else None
        if frame is not None and isinstance(frame.target, dict) and frame.key is None:
            if event.value in frame.target or (event.value == "<<" and frame.merged):
                raise _Refused(f"the key {event.value[:40]!r} occurs twice{_place(event)}")
            frame.key = event.value
            return
        is_plain = event.tag is None and event.implicit[0]
        if event.tag == _NULL_TAG or (is_plain and event.value in _NULL):
            value = None
        elif is_plain and self._is_typed:
            value = _typed(event.value)
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
    documents = _documents(document, YamlLimits(MAX_NODES, LIMIT_SECONDS), is_typed=False)
    if len(documents) > 1:
        raise _Refused("it contains more than one document")
    root = documents[0] if documents else None
    if root is None:
        return []
    if not isinstance(root, list):
        raise _Refused("it must be a list of entries")
    return root


def _documents(document: bytes, limits: YamlLimits, *, is_typed: bool) -> list[Any]:
    """The values of all documents. The limits are for all of them together."""
    if len(document) > MAX_DOCUMENT_BYTES:
        raise _Refused(f"it has {len(document)} bytes; the limit is {MAX_DOCUMENT_BYTES}")
    text = document.decode("utf-8")
    if "\x00" in text:
        raise _Refused("it contains a NUL character")
    builder = _Builder(limits, is_typed=is_typed)
    deadline = time.monotonic() + limits.seconds
    found: list[Any] = []
    for number, event in enumerate(yaml.parse(text, Loader=yaml.CSafeLoader)):
        builder.take(event)
        if isinstance(event, yaml.DocumentEndEvent):
            found.append(builder.root)
            builder.root = None
        if number % _CHECK_TIME_EVERY == 0 and time.monotonic() > deadline:
            raise _Refused(f"parsing it takes more than {limits.seconds:.0f} s")
    return found


def read_mappings(document: bytes, what: str, limits: YamlLimits | None = None) -> list[dict[str, Any]]:
    """Parse mappings with numbers and booleans: one, a list of them, or several documents. Raises `Invalid`.

    Go's parser accepts `\\'` in a double-quoted text, and some of LocalAI's documents have it.
    """
    limits = limits or YamlLimits()
    try:
        try:
            roots = _documents(document, limits, is_typed=True)
        except yaml.YAMLError as error:
            if b"\\'" not in document or "escape" not in str(error):
                raise
            roots = _documents(document.replace(b"\\'", b"'"), limits, is_typed=True)
        items = [item for root in roots if root is not None for item in (root if isinstance(root, list) else [root])]
        for item in items:
            if not isinstance(item, dict):
                raise _Refused("it must be a mapping, or a list of mappings")
        return items
    except (_Refused, yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise Invalid(f"cannot read {what} as YAML: {reason}", code="unsupported") from error


def _typed(text: str) -> str | int | float | bool:
    """A plain value by the rules that LocalAI's parser has: YAML 1.2, without dates and octal numbers."""
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if _WHOLE.fullmatch(text):
        return int(text)
    if _HEXADECIMAL.fullmatch(text):
        return int(text, 16)
    if _FRACTION.fullmatch(text) and isfinite(number := float(text)):
        return number
    return text


class _Writer(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and lists inside of their mapping: as people write configurations."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _write_text(writer: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return writer.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Writer.add_representer(str, _write_text)


def write_mapping(mapping: dict[str, Any]) -> str:
    """A mapping as YAML, in its own order."""
    written: str = yaml.dump(
        mapping, Dumper=_Writer, sort_keys=False, allow_unicode=True, width=120, default_flow_style=False
    )
    return written


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
