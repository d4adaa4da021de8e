"""A backend of LocalAI's protocol on grpcio, whose speed, failures and identity tests choose.

`write_tree(directory, **behaviour)` makes an installed backend of it. What it does before a model is there is in its
`behaviour.json` (`never_ready`, `ignores_key`, `calls_at_once`, `ends`, `lacks`, and what `begin` knows); what it does
with a model is in the model's `options`, each `stub.NAME:VALUE`. As a program it runs from that directory, with
`backend_pb2.py` beside it, and imports nothing else of the project.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SENTENCE = ("The", " capital", " of", " France", " is", " Paris", ".")


def write_tree(tree: Path, **behaviour: object) -> Path:
    """An installed backend; its first line is this interpreter, which has grpcio."""
    from enginehouse.engine import localai

    tree.mkdir(parents=True)
    program = tree / "run.sh"
    program.write_text(f"#!{sys.executable}\n" + Path(__file__).read_text())
    program.chmod(0o755)
    messages = Path(str(localai.__file__)).with_name("backend_pb2.py")
    (tree / "backend_pb2.py").write_bytes(messages.read_bytes())
    (tree / "behaviour.json").write_text(json.dumps(behaviour))
    (tree / "metadata.json").write_text(json.dumps({"name": tree.name}))
    return tree


def in_one_file() -> bytes:
    """The whole program as one executable file, for images that have no other."""
    from enginehouse.engine import localai

    messages = Path(str(localai.__file__)).with_name("backend_pb2.py").read_text()
    lines = [
        f"#!{sys.executable}",
        "import sys, types",
        "messages = types.ModuleType('backend_pb2')",
        f"exec(compile({messages!r}, 'backend_pb2.py', 'exec'), messages.__dict__)",
        "sys.modules['backend_pb2'] = messages",
        f"program = compile({Path(__file__).read_text()!r}, 'stub_backend.py', 'exec')",
        "exec(program, {'__name__': '__main__', '__file__': __file__})",
    ]
    return "\n".join([*lines, ""]).encode()


class Stub:
    """Each call is a method; options are read when a model is loaded."""

    def __init__(self, messages: Any, behaviour: dict[str, Any]) -> None:
        self._messages = messages
        self._behaviour = behaviour
        self._options: dict[str, str] = {}
        self._loaded: Any = None

    def Health(self, _request: Any, context: Any) -> Any:
        if self._behaviour.get("never_ready"):
            context.abort(_status("UNAVAILABLE"), "not ready yet")
        return self._messages.Reply(message=b"OK")

    def LoadModel(self, request: Any, context: Any) -> Any:
        self._options = dict(
            (one.removeprefix("stub.").partition(":")[::2]) for one in request.Options if one.startswith("stub.")
        )
        time.sleep(float(self._options.get("load_seconds", 0)))
        if "die_on_load" in self._options:
            print("out of memory while loading", file=sys.stderr, flush=True)
            os._exit(3)
        if "fail_load" in self._options:
            print("a line about the cause", file=sys.stderr, flush=True)
            context.abort(_status("INTERNAL"), self._options["fail_load"])
        if "refuse_load" in self._options:
            return self._messages.Result(success=False, message=self._options["refuse_load"])
        self._loaded = request
        return self._messages.Result(success=True)

    def Free(self, _request: Any, _context: Any) -> Any:
        marker = self._options.get("free_marker")
        if marker:
            print(f"freed {marker}", file=sys.stderr, flush=True)
        return self._messages.Result(success=True)

    def Predict(self, request: Any, context: Any) -> Any:
        self._check(request, context)
        print("asked", file=sys.stderr, flush=True)
        if "echo_load" in self._options:
            shown = {"Model": self._loaded.Model, "ModelFile": self._loaded.ModelFile, "Threads": self._loaded.Threads}
            shown["ContextSize"] = self._loaded.ContextSize
            return self._messages.Reply(message=json.dumps(shown).encode())
        if "echo_prompt" in self._options:
            return self._messages.Reply(message=request.Prompt.encode())
        if "die_on_request" in self._options:
            os._exit(4)
        time.sleep(float(self._options.get("answer_seconds", 0)))
        return self._messages.Reply(message="".join(SENTENCE).encode(), tokens=len(SENTENCE), prompt_tokens=9)

    def PredictStream(self, request: Any, context: Any) -> Iterator[Any]:
        self._check(request, context)
        count = int(self._options.get("tokens", len(SENTENCE)))
        pause = float(self._options.get("token_seconds", 0))
        # Called when the call is over, also by a client that left: the generator itself may not run again then.
        context.add_callback(lambda: print("call over", file=sys.stderr, flush=True))
        for number in range(count):
            if self._options.get("die_after") == str(number):
                os._exit(4)
            if self._options.get("fail_after") == str(number):
                context.abort(_status("INTERNAL"), "the card is gone")
            yield self._messages.Reply(
                message=SENTENCE[number % len(SENTENCE)].encode(), tokens=number + 1, prompt_tokens=9
            )
            time.sleep(pause)

    def Embedding(self, request: Any, context: Any) -> Any:
        self._check(request, context)
        vector = [float(len(request.Embeddings)), 0.5, -0.25]
        return self._messages.EmbeddingResult(embeddings=vector, dim=3, prompt_tokens=2)

    def Rerank(self, request: Any, context: Any) -> Any:
        self._check(request, context)
        result = self._messages.RerankResult()
        for index, text in enumerate(request.documents):
            result.results.add(index=index, text=text, relevance_score=float(request.query in text))
        return result

    def TokenizeString(self, request: Any, context: Any) -> Any:
        self._check(request, context)
        tokens = [len(word) for word in request.Prompt.split()]
        return self._messages.TokenizationResponse(length=len(tokens), tokens=tokens)

    def _check(self, request: Any, context: Any) -> None:
        if self._loaded is None:
            context.abort(_status("FAILED_PRECONDITION"), "model not loaded")
        asked = request.ModelIdentity
        if asked and asked != self._loaded.Model:
            context.abort(_status("NOT_FOUND"), f"model identity mismatch: {asked} and {self._loaded.Model}")


def _status(name: str) -> Any:
    import grpc

    return getattr(grpc.StatusCode, name)


def begin(behaviour: dict[str, Any]) -> None:
    """What an engine of any protocol does before it listens: `start_seconds`, `ends` (its last words; with `ends_on`,
    only on this port), `forks` a child that leaves its session, `prints_bytes` without a newline, `ignores_sigterm`.
    """
    if behaviour.get("ignores_sigterm"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behaviour.get("forks") and not os.fork():
        os.setsid()
        if not os.fork():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.pause()
        os._exit(0)
    for _ in range(int(behaviour.get("prints_bytes", 0)) // 65536):
        os.write(2, b"x" * 65536)
    time.sleep(float(behaviour.get("start_seconds", 0)))
    is_spared = "ends_on" in behaviour and not sys.argv[-1].endswith(f":{behaviour['ends_on']}")
    if behaviour.get("ends") and not is_spared:
        print(behaviour["ends"], file=sys.stderr, flush=True)
        os._exit(1)


def is_listening(behaviour: dict[str, Any]) -> None:
    """What it does afterwards: with `dies_seconds` it ends with code 7."""
    if "dies_seconds" in behaviour:

        def die() -> None:
            print("the card fell off the bus", file=sys.stderr, flush=True)
            os._exit(7)

        threading.Timer(float(behaviour["dies_seconds"]), die).start()


def main() -> None:
    here = Path(__file__).parent
    sys.path.insert(0, str(here))
    import backend_pb2
    import grpc

    chosen = here / "behaviour.json"
    behaviour = json.loads(chosen.read_text()) if chosen.exists() else {}
    begin(behaviour)
    stub = Stub(backend_pb2, behaviour)
    expected = os.environ.get("LOCALAI_GRPC_AUTH_TOKEN", "")

    def guarded(call: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def answer(request: Any, context: Any) -> Any:
            given = dict(context.invocation_metadata()).get("authorization", "")
            if expected and not behaviour.get("ignores_key") and given != f"Bearer {expected}":
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong key")
            return call(request, context)

        return answer

    handlers = {}
    for method in backend_pb2.DESCRIPTOR.services_by_name["Backend"].methods:
        call = getattr(stub, method.name, None)
        if call is not None and method.name not in behaviour.get("lacks", ()):
            make = (
                grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
            )
            handlers[method.name] = make(
                guarded(call),
                request_deserializer=getattr(backend_pb2, method.input_type.name).FromString,
                response_serializer=getattr(backend_pb2, method.output_type.name).SerializeToString,
            )
    server = grpc.server(
        ThreadPoolExecutor(int(behaviour.get("calls_at_once", 32))), options=[("grpc.so_reuseport", 0)]
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("backend.Backend", handlers),))
    if not server.add_insecure_port(sys.argv[sys.argv.index("--addr") + 1]):
        os._exit(98)
    server.start()
    is_listening(behaviour)
    server.wait_for_termination()


if __name__ == "__main__":
    main()
