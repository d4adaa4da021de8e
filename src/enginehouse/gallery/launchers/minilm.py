"""Serves the sentence embeddings of all-MiniLM-L6-v2 over HTTP in OpenAI's protocol, with llama.cpp and without torch.

This file is copied into the backend's directory and runs in its environment, so it imports nothing of enginehouse and
nothing but the standard library besides the engine. The weights come as safetensors with their vocabulary; the engine
reads GGUF, so they are written as such into the temporary directory first: the same numbers in another frame. Address,
description file and exit codes are those of the other launchers: 98 when the port cannot be had, else the last line.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import struct
import sys
import tempfile
from typing import Any, BinaryIO, NoReturn

CANNOT_BIND = 98  # EADDRINUSE on Linux
PR_SET_PDEATHSIG = 1
LOG_WARNINGS = 2
HTTP_THREADS = 32
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


def die_with_parent() -> None:
    """Repeats what the parent asked for before exec: a shell between the two would otherwise have lost it."""
    if sys.platform == "linux":
        import ctypes

        parent = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def leave(code: int, message: str) -> NoReturn:
    """Ends at once: the engine's threads and destructors must neither delay the end nor write after the last line."""
    sys.stdout.flush()
    print(message, file=sys.stderr, flush=True)
    os._exit(code)


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


def check_port(host: str, port: int) -> None:
    """The engine itself says only that it could not start, so the reason is found out here first."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            leave(CANNOT_BIND, f"cannot listen on {host}:{port}: {error.strerror}")


def serve(model: dict[str, Any], host: str, port: int) -> None:
    import xllamacpp

    check_port(host, port)
    # Removed with the process by the worker; the name is free again as soon as the engine has the file open.
    directory = tempfile.mkdtemp(prefix="minilm-")
    path = os.path.join(directory, "minilm.gguf")
    try:
        with open(path, "wb") as target:
            write_gguf(model["path"], target)
    except (OSError, ValueError, KeyError, struct.error) as error:
        leave(1, f"cannot read the weights of {os.path.basename(model['path'])}: {error}")
    chosen = xllamacpp.CommonParams()
    parallel = max(1, int(model.get("parallel") or 1))
    chosen.model.path = path
    chosen.hostnames, chosen.port, chosen.api_keys = [host], port, [model["key"]]
    chosen.model_alias = {model["name"]}
    chosen.embedding = True
    # One input is one batch, or its vector would be that of its last part only.
    chosen.n_ctx, chosen.n_batch, chosen.n_ubatch = CONTEXT * parallel, CONTEXT, CONTEXT
    chosen.n_parallel = parallel
    chosen.cpuparams.n_threads = chosen.cpuparams_batch.n_threads = max(1, int(model.get("threads") or 1))
    chosen.n_threads_http = HTTP_THREADS + parallel
    chosen.cors_origins, chosen.cors_credentials = "https://none.invalid", False
    chosen.ui, chosen.endpoint_slots, chosen.endpoint_props, chosen.offline = False, False, False, True
    chosen.verbosity = LOG_WARNINGS
    try:
        server = xllamacpp.Server(chosen)
    except (RuntimeError, ValueError):
        check_port(host, port)
        leave(1, "cannot load the model: its files are damaged or memory is short")
    shutil.rmtree(directory, ignore_errors=True)
    print(f"listening on {server.listening_address}", file=sys.stderr, flush=True)
    while True:
        signal.pause()


def check_engine() -> NoReturn:
    """Whether the engine runs on this machine at all; asked once, before the backend is put in its place."""
    try:
        import xllamacpp
    except ImportError as error:
        told = " ".join(str(error).split())
        if "libgomp" in told:
            told = "the library libgomp.so.1 is missing; install it (on Debian and Ubuntu: apt-get install libgomp1)"
        leave(1, f"cannot use xllamacpp on this machine: {told}")
    xllamacpp.CommonParams()
    os._exit(0)


def main() -> None:
    if sys.argv[1:] == ["--check"]:
        check_engine()
    die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if len(sys.argv) != 3 or sys.argv[1] != "--addr":
        leave(2, "usage: launcher.py --addr HOST:PORT, or --check: only see whether the engine can run here")
    host, _, port = sys.argv[2].rpartition(":")
    try:
        with open(os.environ["ENGINEHOUSE_MODEL_FILE"], encoding="utf-8") as file:
            model = json.load(file)
    except (KeyError, OSError, ValueError) as error:
        leave(2, f"cannot read the description of the model: {error}")
    serve(model, host.strip("[]"), int(port))


if __name__ == "__main__":
    main()
