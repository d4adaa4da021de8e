"""Serves the sentence embeddings of all-MiniLM-L6-v2 over HTTP in OpenAI's protocol, with llama.cpp and without torch.

This file is copied into the backend's directory beside `startup.py` and runs in its environment, so it imports nothing
of enginehouse. The weights come as safetensors with their vocabulary; the engine reads GGUF, so they are written as
such into the temporary directory first: the same numbers in another frame.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys
import tempfile
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from enginehouse.gallery.launchers import startup
else:
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # -I leaves it out
    import startup

ALIGNMENT = 32
CONTEXT = 512  # tokens; what the model was trained on
# Types of values and tensors in a GGUF file.
U32, I32, F32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
TENSOR_F32 = 0
MEAN_POOLING = 1
NORMAL, CONTROL = 1, 3
_OF_EMBEDDINGS = {
    "word_embeddings": "token_embd",
    "position_embeddings": "position_embd",
    "token_type_embeddings": "token_types",
    "LayerNorm": "token_embd_norm",
}
_OF_LAYER = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}


def gguf_name(name: str) -> str | None:
    """The name of a tensor in a GGUF file; None for one that embeddings do not need."""
    path, _, kind = name.rpartition(".")
    if path.startswith("embeddings."):
        return f"{_OF_EMBEDDINGS[path.removeprefix('embeddings.')]}.{kind}" if kind != "position_ids" else None
    if path.startswith("encoder.layer."):
        number, _, part = path.removeprefix("encoder.layer.").partition(".")
        return f"blk.{number}.{_OF_LAYER[part]}.{kind}"
    return None


def text(value: str) -> bytes:
    content = value.encode()
    return struct.pack("<Q", len(content)) + content


def pair(key: str, kind: int, value: Any) -> bytes:
    if kind == STRING:
        return text(key) + struct.pack("<I", kind) + text(value)
    return text(key) + struct.pack("<I" + {U32: "I", I32: "i", F32: "f", BOOL: "?"}[kind], kind, value)


def array(key: str, kind: int, values: list[Any]) -> bytes:
    items = b"".join(text(one) for one in values) if kind == STRING else struct.pack(f"<{len(values)}i", *values)
    return text(key) + struct.pack("<IIQ", ARRAY, kind, len(values)) + items


def vocabulary(directory: str) -> tuple[list[str], list[int]]:
    """The words as the engine has them: parts of words bare, beginnings with a mark, and special ones as they are."""
    with open(os.path.join(directory, "vocab.txt"), encoding="utf-8") as file:
        words = file.read().split("\n")
    words = words[:-1] if words and not words[-1] else words
    special = [one.startswith("[") and one.endswith("]") and len(one) > 2 for one in words]
    marked = [
        one if is_special else one.removeprefix("##") if one.startswith("##") else "\u2581" + one
        for one, is_special in zip(words, special, strict=True)
    ]
    return marked, [CONTROL if one else NORMAL for one in special]


def metadata(directory: str) -> list[bytes]:
    with open(os.path.join(directory, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    words, kinds = vocabulary(directory)
    ids = {word: number for number, word in enumerate(words)}
    return [
        pair("general.architecture", STRING, "bert"),
        pair("general.name", STRING, "all-MiniLM-L6-v2"),
        pair("general.file_type", U32, 0),
        pair("bert.block_count", U32, config["num_hidden_layers"]),
        pair("bert.context_length", U32, config["max_position_embeddings"]),
        pair("bert.embedding_length", U32, config["hidden_size"]),
        pair("bert.feed_forward_length", U32, config["intermediate_size"]),
        pair("bert.attention.head_count", U32, config["num_attention_heads"]),
        pair("bert.attention.layer_norm_epsilon", F32, config["layer_norm_eps"]),
        pair("bert.attention.causal", BOOL, False),
        pair("bert.pooling_type", U32, MEAN_POOLING),
        pair("tokenizer.ggml.model", STRING, "bert"),
        pair("tokenizer.ggml.token_type_count", U32, config["type_vocab_size"]),
        array("tokenizer.ggml.tokens", STRING, words),
        array("tokenizer.ggml.token_type", I32, kinds),
        pair("tokenizer.ggml.bos_token_id", U32, ids["[CLS]"]),
        pair("tokenizer.ggml.cls_token_id", U32, ids["[CLS]"]),
        pair("tokenizer.ggml.eos_token_id", U32, ids["[SEP]"]),
        pair("tokenizer.ggml.seperator_token_id", U32, ids["[SEP]"]),
        pair("tokenizer.ggml.unknown_token_id", U32, ids["[UNK]"]),
        pair("tokenizer.ggml.padding_token_id", U32, ids["[PAD]"]),
        pair("tokenizer.ggml.mask_token_id", U32, ids["[MASK]"]),
    ]


def write_gguf(weights: str, target: BinaryIO) -> None:
    """The weights and the vocabulary beside them as one GGUF file, each number as it is."""
    with open(weights, "rb") as source:
        (size,) = struct.unpack("<Q", source.read(8))
        tensors = json.loads(source.read(size))
        first = 8 + size
        tensors.pop("__metadata__", None)
        named = [(gguf_name(name), one) for name, one in tensors.items()]
        kept = [(name, one) for name, one in named if name is not None]
        if any(one["dtype"] != "F32" for _, one in kept):
            raise ValueError("the weights are not 32-bit floats")
        values = metadata(os.path.dirname(weights))
        head = b"GGUF" + struct.pack("<IQQ", 3, len(kept), len(values)) + b"".join(values)
        offset, infos = 0, []
        for name, one in kept:
            shape = one["shape"][::-1]
            infos.append(text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, TENSOR_F32, offset))
            begin, end = one["data_offsets"]
            offset += padded(end - begin)
        head += b"".join(infos)
        target.write(head.ljust(padded(len(head)), b"\0"))
        for _, one in kept:
            begin, end = one["data_offsets"]
            source.seek(first + begin)
            target.write(source.read(end - begin).ljust(padded(end - begin), b"\0"))


def padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def serve(model: dict[str, Any], host: str, port: int) -> None:
    startup.check_port(host, port)
    # Removed with the process by the worker; the name is free again as soon as the engine has the file open.
    directory = tempfile.mkdtemp(prefix="minilm-")
    path = os.path.join(directory, "minilm.gguf")
    try:
        with open(path, "wb") as target:
            write_gguf(model["path"], target)
    except (OSError, ValueError, KeyError, struct.error) as error:
        startup.leave(1, f"cannot read the weights of {os.path.basename(model['path'])}: {error}")
    chosen = startup.http_parameters(model, path, host, port)
    chosen.embedding = True
    # One input is one batch, or its vector would be that of its last part only.
    chosen.n_ctx, chosen.n_batch, chosen.n_ubatch = CONTEXT * chosen.n_parallel, CONTEXT, CONTEXT
    trouble = "cannot load the model: its files are damaged or memory is short"
    _server = startup.start(chosen, host, port, trouble)
    shutil.rmtree(directory, ignore_errors=True)
    startup.wait_for_ever()


if __name__ == "__main__":
    host, port = startup.split_address(startup.begin())
    serve(startup.read_model(), host, port)
