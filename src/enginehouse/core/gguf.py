"""The header of a GGUF file: what the model is, how it was quantised and how large its context may become.

Pure: reads bytes that somebody else fetched. The bytes may be the beginning of the file only; then the result says so
(`is_complete`) and has what was found until there. Work is bounded by the number of bytes: every count is checked
against what is left before anything is read, and a header that makes no sense is refused with one sentence.
"""

from __future__ import annotations

import re
import struct
from math import prod

from msgspec import Struct

from enginehouse.core.errors import Invalid
from enginehouse.core.name import shown

MAGIC = b"GGUF"
PREFIX_BYTES = 256 * 1024  # holds the keys before the vocabulary, in the order in which converters write them
MAX_PAIRS = 65_536
MAX_TENSORS = 1_000_000
MAX_KEY_BYTES = 65_535  # by the format
MAX_TEXT_BYTES = 16 * 1024**2  # chat templates are the longest texts, with some ten thousand bytes
MAX_NESTING = 4
MAX_DIMENSIONS = 4
ALIGNMENT = 32  # of the tensors, unless `general.alignment` says another one
# Elements and bytes of a block, by the number of a tensor's type. Of others only the beginning of a tensor is known.
_BLOCKS = {
    0: (1, 4),
    1: (1, 2),
    2: (32, 18),
    3: (32, 20),
    6: (32, 22),
    7: (32, 24),
    8: (32, 34),
    10: (256, 84),
    11: (256, 110),
    12: (256, 144),
    13: (256, 176),
    14: (256, 210),
    30: (1, 2),
}
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# `general.file_type`: the names that llama.cpp gives to its numbers.
_FILE_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
}
_ENCODERS = frozenset(
    {"bert", "nomic-bert", "nomic-bert-moe", "jina-bert-v2", "jina-bert-v3", "modern-bert", "t5encoder"}
)
# Architectures that llama.cpp runs. A newer engine may know more, so an unknown one is a warning only.
_KNOWN = _ENCODERS | frozenset(
    re.findall(
        r"\S+",
        "llama llama4 deci falcon falcon-h1 grok gpt2 gptj gptneox gpt-oss mpt baichuan starcoder starcoder2 refact "
        "bloom stablelm qwen qwen2 qwen2moe qwen2vl qwen3 qwen3moe qwen3vl qwen3vlmoe qwen3next phi2 phi3 phimoe plamo "
        "plamo2 codeshell orion internlm2 minicpm minicpm3 gemma gemma2 gemma3 gemma3n gemma-embedding mamba mamba2 "
        "jamba xverse command-r cohere2 dbrx olmo olmo2 olmoe openelm arctic deepseek deepseek2 chatglm glm4 glm4moe "
        "bitnet t5 jais nemotron nemotron_h exaone exaone4 rwkv6 rwkv6qwen2 rwkv7 granite granitemoe granitehybrid "
        "chameleon smollm3 lfm2 lfm2moe ernie4_5 ernie4_5-moe hunyuan-moe hunyuan-dense seed_oss dream llada "
        "wavtokenizer-dec bailingmoe bailingmoe2 dots1 arcee afmoe apertus mistral3",
    )
)
_RANK_POOLING = 4  # llama.cpp's number of the pooling that ranks


class GgufHeader(Struct, frozen=True, kw_only=True):
    """What the header says; 0 and "" where it says nothing."""

    version: int
    architecture: str = ""
    name: str = ""
    license: str = ""
    quantization: str = ""
    context_length: int = 0
    block_count: int = 0
    embedding_length: int = 0
    head_count: int = 0
    head_count_kv: int = 0
    key_length: int = 0
    value_length: int = 0
    parameter_count: int = 0  # known only of a complete header
    has_chat_template: bool = False
    is_embedding: bool = False
    is_reranker: bool = False
    is_projector: bool = False
    is_complete: bool = True

    @property
    def cache_bytes_per_token(self) -> int:
        """Keys and values of one token, two bytes each; 0 if the header does not tell."""
        width = self.key_length + self.value_length
        if not width and self.head_count:
            width = 2 * (self.embedding_length // self.head_count)
        return 2 * self.block_count * (self.head_count_kv or self.head_count) * width


class _CutOff(Exception):
    """The bytes end before the header does."""


class _Reader:
    def __init__(self, content: bytes) -> None:
        self._content = content
        self._position = 0

    def number(self, form: str) -> int | float | bool:
        size = struct.calcsize(f"<{form}")
        self.need(size)
        (value,) = struct.unpack_from(f"<{form}", self._content, self._position)
        self._position += size
        found: int | float | bool = value
        return found

    def whole(self, form: str) -> int:
        return int(self.number(form))

    @property
    def position(self) -> int:
        return self._position

    def need(self, count: int) -> None:
        if count > len(self._content) - self._position:
            raise _CutOff

    def text(self, limit_bytes: int) -> str:
        length = self.whole("Q")
        if length > limit_bytes:
            raise _refused(f"a text in it has {length} bytes")
        self.need(length)
        start, self._position = self._position, self._position + length
        return self._content[start : self._position].decode("utf-8", "replace")

    def skip(self, count: int) -> None:
        self.need(count)
        self._position += count

    def value(self, kind: int, depth: int = 0) -> object:
        """One value. Of an array only the first numbers are kept: those of layers may differ, vocabularies are long."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text(MAX_TEXT_BYTES)
        if kind != _ARRAY:
            raise _refused(f"it has a value of the unknown type {kind}")
        if depth >= MAX_NESTING:
            raise _refused("its arrays are nested too deep")
        inner, count = self.whole("I"), self.whole("Q")
        if inner in _SCALARS:
            size = struct.calcsize(f"<{_SCALARS[inner]}")
            first = self.number(_SCALARS[inner]) if count else 0
            self.skip(size * max(0, count - 1))
            return [first] if count else []
        if inner not in (_STRING, _ARRAY):
            raise _refused(f"it has an array of the unknown type {inner}")
        for _ in range(count):  # ends early: each element takes bytes, and too few are a cut-off header
            self.value(inner, depth + 1)
        return []


def is_gguf(content: bytes) -> bool:
    return content[:4] == MAGIC


def read_gguf(content: bytes, size_bytes: int | None = None) -> GgufHeader:
    """Read the header of a file of `size_bytes`, of which `content` is the beginning. 0: the size is unknown; None:
    `content` is the whole file. A file that ends before its tensors do is refused.
    """
    size_bytes = len(content) if size_bytes is None else size_bytes
    if not is_gguf(content):
        raise _refused("it does not begin like one; check the address or the path")
    reader = _Reader(content)
    reader.skip(4)
    try:
        version, tensors, pairs = reader.whole("I"), reader.whole("Q"), reader.whole("Q")
    except _CutOff:
        raise _cut_off(len(content)) from None
    if version not in (2, 3):
        known = (
            "it is written for a machine of the other byte order" if version > 0xFFFF else f"its version is {version}"
        )
        raise _refused(f"{known}; versions 2 and 3 can be read")
    if pairs > MAX_PAIRS or tensors > MAX_TENSORS:
        raise _refused(f"it claims {pairs} keys and {tensors} tensors")
    found: dict[str, object] = {}
    parameters = least_bytes = 0
    try:
        for _ in range(pairs):
            key = reader.text(MAX_KEY_BYTES)
            found[key] = reader.value(reader.whole("I"))
        for _ in range(tensors):
            elements, end = _tensor(reader)
            parameters += elements
            least_bytes = max(least_bytes, end)
    except _CutOff:
        if len(content) >= size_bytes > 0:
            raise _cut_off(len(content)) from None
        return _header(version, found, 0, is_complete=False)
    alignment = _whole(found, "general.alignment") or ALIGNMENT
    least_bytes += -(-reader.position // alignment) * alignment if least_bytes else 0
    if 0 < size_bytes < least_bytes:
        raise _refused(f"it is cut off: it has {size_bytes} bytes of at least {least_bytes}; fetch the file again")
    return _header(version, found, parameters, is_complete=True)


def _tensor(reader: _Reader) -> tuple[int, int]:
    """How many elements a tensor has, and where it ends among the tensors, as far as its type is known."""
    reader.text(MAX_KEY_BYTES)
    dimensions = reader.whole("I")
    if dimensions > MAX_DIMENSIONS:
        raise _refused(f"a tensor in it has {dimensions} dimensions")
    elements = prod(reader.whole("Q") for _ in range(dimensions))
    per_block, block_bytes = _BLOCKS.get(reader.whole("I"), (1, 0))
    return elements, reader.whole("Q") + -(-elements // per_block) * block_bytes


def _header(version: int, found: dict[str, object], parameters: int, *, is_complete: bool) -> GgufHeader:
    architecture = _text(found, "general.architecture")
    if is_complete and not architecture:
        raise _refused("it does not say which architecture it is")

    def of(key: str) -> int:
        return _whole(found, f"{architecture}.{key}")

    pooling = of("pooling_type")
    is_reranker = pooling == _RANK_POOLING
    quantization = _FILE_TYPES.get(_whole(found, "general.file_type"), "") if "general.file_type" in found else ""
    return GgufHeader(
        version=version,
        architecture=architecture,
        name=_text(found, "general.name"),
        license=_text(found, "general.license"),
        quantization=quantization,
        context_length=of("context_length"),
        block_count=of("block_count"),
        embedding_length=of("embedding_length"),
        head_count=of("attention.head_count"),
        head_count_kv=of("attention.head_count_kv") or of("attention.head_count"),
        key_length=of("attention.key_length"),
        value_length=of("attention.value_length"),
        parameter_count=parameters,
        has_chat_template="tokenizer.chat_template" in found,
        is_embedding=not is_reranker and (architecture in _ENCODERS or pooling > 0),
        is_reranker=is_reranker,
        is_projector=architecture == "clip" or _text(found, "general.type") == "mmproj",
        is_complete=is_complete,
    )


def _text(found: dict[str, object], key: str) -> str:
    value = found.get(key)
    return "".join(one for one in value if one.isprintable())[:200] if isinstance(value, str) else ""


def _whole(found: dict[str, object], key: str) -> int:
    value = found.get(key)
    first = value[0] if isinstance(value, list) and value else value
    return first if isinstance(first, int) and 0 <= first < 2**53 else 0


def _cut_off(count: int) -> Invalid:
    return _refused(f"its header is cut off after {count} bytes; fetch the file again")


def _refused(why: str) -> Invalid:
    return Invalid(f"cannot read the file as GGUF: {why}", code="unsupported", param="source")


def about_architecture(header: GgufHeader) -> str:
    """A sentence about an architecture that llama.cpp is not known to run; "" otherwise."""
    if not header.architecture or header.architecture in _KNOWN or header.is_projector:
        return ""
    return f"the architecture {shown(header.architecture)} is not known here: the engine may refuse the model"
