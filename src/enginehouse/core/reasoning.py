"""Separates what a model thinks from what it answers, by the tags around its thoughts.

Text may arrive in pieces of any length: a tag that is split over pieces is found, and the result does not depend on the
pieces. Only the end of a text that could begin a tag is held back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from enginehouse.core.model_config import ReasoningConfig

DEFAULT_TAGS = (
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<seed:think>", "</seed:think>"),
    ("<think>", "</think>"),
    ("<|think|>", "<|end|>"),
    ("<thinking>", "</thinking>"),
    ("[THINK]", "[/THINK]"),
)
TAG_BEGINNINGS = ("<", "[")  # of the usual tags; a configuration may have others


class Split(NamedTuple):
    reasoning: str
    content: str


def tags_of(config: ReasoningConfig) -> tuple[tuple[str, str], ...]:
    """The configured pairs first, then the usual ones; a start token without a pair ends as `<think>` does."""
    configured = [(pair.start, pair.end) for pair in config.tag_pairs if pair.start and pair.end]
    ends = dict([*DEFAULT_TAGS, *configured])
    configured += [(start, ends.get(start, "</think>")) for start in config.thinking_start_tokens if start]
    return tuple(dict([*DEFAULT_TAGS, *configured]).items())


def begins_inside(prompt: str, tags: Sequence[tuple[str, str]]) -> str:
    """The end tag to look for if a prompt ends with a start tag, so that the answer begins with thoughts; or ""."""
    ending = prompt.rstrip()
    return next((end for start, end in tags if ending.endswith(start)), "")


class ReasoningSplitter:
    """`inside` is the end tag if the text begins with thoughts."""

    def __init__(self, tags: Sequence[tuple[str, str]] = DEFAULT_TAGS, *, inside: str = "") -> None:
        self._ends = dict(tags)
        self._firsts = "".join({start[0] for start in self._ends})
        self._inside = inside
        self._held = ""
        self._drops_space = bool(inside)  # right after a tag: the line break there belongs to the tag

    def feed(self, text: str) -> Split:
        if not self._inside and not self._held and not self._drops_space:
            # The usual piece has no character that begins a tag.
            for first in self._firsts:
                if first in text:
                    break
            else:
                return Split("", text)
        return self._split(self._held + text, is_last=False)

    def is_passing(self) -> bool:
        """Whether the next text is content unless it has one of `TAG_BEGINNINGS`."""
        return not (self._inside or self._held or self._drops_space or set(self._firsts) - set(TAG_BEGINNINGS))

    def finish(self) -> Split:
        return self._split(self._held, is_last=True)

    def _split(self, text: str, *, is_last: bool) -> Split:
        thoughts: list[str] = []
        contents: list[str] = []
        while True:
            if self._drops_space:
                text = text.lstrip("\r\n")
                self._drops_space = not text
            wanted = [self._inside] if self._inside else list(self._ends)
            into = thoughts if self._inside else contents
            position, tag = _first(text, wanted)
            if position < 0:
                kept = 0 if is_last else _possible_tag(text, wanted)
                into.append(text[: len(text) - kept])
                self._held = text[len(text) - kept :]
                return Split("".join(thoughts), "".join(contents))
            into.append(text[:position])
            text = text[position + len(tag) :]
            self._inside = "" if self._inside else self._ends[tag]
            self._drops_space = True


def _first(text: str, tags: Sequence[str]) -> tuple[int, str]:
    """The first tag in a text and where it is; of two at one place the longer one."""
    found = [(position, -len(tag), tag) for tag in tags if (position := text.find(tag)) >= 0]
    if not found:
        return -1, ""
    position, _, tag = min(found)
    return position, tag


def _possible_tag(text: str, tags: Sequence[str]) -> int:
    """The length of the longest end of a text that a tag begins with."""
    longest = 0
    for tag in tags:
        for length in range(min(len(tag) - 1, len(text)), longest, -1):
            if text.endswith(tag[:length]):
                longest = length
                break
    return longest
