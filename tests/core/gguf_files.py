"""Small GGUF files, made by the format's description."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from math import prod

ALIGNMENT = 32


def text(value: str) -> bytes:
    content = value.encode()
    return struct.pack("<Q", len(content)) + content


def typed(value: object) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    assert isinstance(value, list)
    if all(isinstance(one, str) for one in value):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(text(one) for one in value)
    return struct.pack("<IIQ", 9, 4, len(value)) + b"".join(struct.pack("<I", one) for one in value)


def gguf(pairs: Mapping[str, object], tensors: Sequence[tuple[str, tuple[int, ...]]] = (), version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs))
    body = b"".join(text(key) + typed(value) for key, value in pairs.items())
    end = 0  # of the tensors, which are 32-bit numbers
    for name, shape in tensors:
        body += text(name) + struct.pack("<I", len(shape)) + b"".join(struct.pack("<Q", one) for one in shape)
        body += struct.pack("<IQ", 0, end)
        end += -(-4 * prod(shape) // ALIGNMENT) * ALIGNMENT
    header = head + body
    return header + bytes(-len(header) % ALIGNMENT + end) if tensors else header


LLAMA: dict[str, object] = {
    "general.architecture": "llama",
    "general.name": "Tiny",
    "general.license": "mit",
    "general.file_type": 15,
    "llama.context_length": 4096,
    "llama.block_count": 2,
    "llama.embedding_length": 64,
    "llama.attention.head_count": 8,
    "llama.attention.head_count_kv": [2, 2],
    "tokenizer.ggml.tokens": ["a", "b", "c"],
    "tokenizer.chat_template": "{{ messages }}",
}
TENSORS = [("token_embd.weight", (64, 3)), ("output.weight", (64, 3))]
