"""Serves one GGUF model in LocalAI's gRPC protocol with xllamacpp: texts, chats, embeddings, reranking, tokens.

This file is copied into the backend's directory beside `startup.py` and `backend_pb2.py` and runs in its environment,
so it imports nothing of enginehouse. It is also the example of docs/engines.md for backends of your own. The process
begins without a model: `LoadModel` brings it, and every later request must name the same one. LOCALAI_GRPC_AUTH_TOKEN
is its key.
"""

from __future__ import annotations

import hmac
import json
import os
import queue
import socket
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from enginehouse.gallery.launchers import startup
else:
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # -I leaves it out
    import startup

MAX_MESSAGE_BYTES = 50 * 1024 * 1024  # LocalAI's limit
# More than an engine computes at once: `Health` must be answered while requests wait for their turn.
CALLS = 64
SERVICE = "backend.Backend"


class Refused(Exception):
    """A call that ends with a status other than OK."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status


class Engine:
    """llama.cpp's server in this process. Its methods take and give what its HTTP API takes and gives."""

    def __init__(self, options: Any) -> None:
        import secrets

        import xllamacpp

        self._key = secrets.token_urlsafe(32)
        named = dict(_named(one) for one in options.Options)
        parallel = max(1, int(named.get("parallel") or named.get("n_parallel") or 1))
        chosen = startup.parameters(options.ModelFile, max(1, options.Threads or 1), parallel)
        if options.MMProj:
            chosen.mmproj.path = options.MMProj
        # The engine divides its context among the slots; what was asked for is the context of each request.
        chosen.n_ctx = options.ContextSize * parallel
        if options.NBatch:
            chosen.n_batch = chosen.n_ubatch = options.NBatch
        chosen.n_gpu_layers = options.NGPULayers  # 0 is none; the engine's own default would be all
        chosen.embedding = options.Embeddings or options.Reranking
        if options.Reranking:
            chosen.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_RANK
        chosen.use_jinja = True
        # Its own HTTP server cannot be switched off. Nobody else knows this key.
        chosen.hostnames, chosen.port, chosen.api_keys = ["127.0.0.1"], free_port(), [self._key]
        self._server = xllamacpp.Server(chosen)
        self.is_for_text = not chosen.embedding
        self.is_for_ranks = options.Reranking

    def chat(self, body: dict[str, Any], each: Callable[[dict[str, Any]], bool] | None = None) -> Any:
        return self._server.handle_chat_completions(body, each)

    def complete(self, body: dict[str, Any], each: Callable[[dict[str, Any]], bool] | None = None) -> Any:
        return self._server.handle_completions(body, each)

    def embed(self, body: dict[str, Any]) -> Any:
        return self._server.handle_embeddings(body)

    def rank(self, body: dict[str, Any]) -> Any:
        return self._server.handle_rerank(body)

    def ask(self, path: str, body: dict[str, Any]) -> Any:
        """For what the module has no function for."""
        request = urllib.request.Request(
            f"{self._server.listening_address}{path}",
            json.dumps(body).encode(),
            {"content-type": "application/json", "authorization": f"Bearer {self._key}"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)


class Backend:
    """The calls of the protocol. Each takes a message and gives a message, or an iterator of messages."""

    def __init__(self, messages: Any) -> None:
        self._messages = messages
        self._engine: Engine | None = None
        self._identity = ""
        self._loading = threading.Lock()

    def Health(self, _request: Any) -> Any:
        return self._messages.Reply(message=b"OK")

    def Status(self, _request: Any) -> Any:
        states = self._messages.StatusResponse
        return states(state=states.READY if self._engine is not None else states.UNINITIALIZED)

    def LoadModel(self, options: Any) -> Any:
        with self._loading:
            self._engine = None
            check_model(options.ModelFile)
            try:
                self._engine = Engine(options)
            except (RuntimeError, ValueError) as error:
                told = " ".join(str(error).split())
                raise Refused(
                    "INTERNAL",
                    f"cannot load {os.path.basename(options.ModelFile)}: the file is cut off, damaged or of an unknown "
                    f"kind, or memory is short ({told})",
                ) from error
            self._identity = options.Model
        return self._messages.Result(success=True, message="loaded")

    def Free(self, _request: Any) -> Any:
        self._engine = None
        return self._messages.Result(success=True)

    def Predict(self, request: Any) -> Any:
        call, body = self._asked(request)
        answer = checked(call(body))
        choice = answer["choices"][0]
        message = choice.get("message") or {"content": choice.get("text")}
        return self._reply(message, answer, choice)

    def PredictStream(self, request: Any, is_active: Callable[[], bool]) -> Iterator[Any]:
        call, body = self._asked(request)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def each(chunk: dict[str, Any]) -> bool:
            arrived.put(chunk)
            return not is_active()  # true stops the generation

        def run() -> None:
            try:
                arrived.put(call(body, each))
            except (RuntimeError, ValueError) as error:
                arrived.put({"error": {"code": 500, "message": str(error)}})
            arrived.put(None)

        threading.Thread(target=run, daemon=True).start()
        while True:
            chunk = arrived.get()
            if chunk is None:
                return
            answer = checked(chunk)
            choices = answer.get("choices") or [{}]
            delta = choices[0].get("delta") or {"content": choices[0].get("text")}
            yield self._reply(delta, answer, choices[0])

    def Embedding(self, request: Any) -> Any:
        engine = self._loaded(request)
        text: Any = request.Embeddings or list(request.EmbeddingTokens)
        answer = checked(engine.embed({"input": text, "encoding_format": "float"}))
        vector = answer["data"][0]["embedding"]
        used = (answer.get("usage") or {}).get("prompt_tokens") or 0
        result = self._messages.EmbeddingResult(embeddings=vector, dim=len(vector), tokens=1, prompt_tokens=used)
        result.layout = self._messages.EMBEDDING_LAYOUT_FINAL
        return result

    def Rerank(self, request: Any) -> Any:
        engine = self._loaded(request)
        if not engine.is_for_ranks:
            raise Refused("UNIMPLEMENTED", "the model was not loaded for reranking: set `reranking: true`")
        documents = list(request.documents)
        body = {"query": request.query, "documents": documents, "top_n": request.top_n or len(documents)}
        answer = checked(engine.rank(body))
        result = self._messages.RerankResult()
        for one in answer["results"]:
            result.results.add(
                index=one["index"], text=documents[one["index"]], relevance_score=float(one["relevance_score"])
            )
        used = answer.get("usage") or {}
        result.usage.total_tokens = used.get("total_tokens") or 0
        result.usage.prompt_tokens = used.get("prompt_tokens") or 0
        return result

    def TokenizeString(self, request: Any) -> Any:
        tokens = self._loaded(request).ask("/tokenize", {"content": request.Prompt, "add_special": False})["tokens"]
        return self._messages.TokenizationResponse(length=len(tokens), tokens=tokens)

    def Detokenize(self, request: Any) -> Any:
        content = self._loaded(request).ask("/detokenize", {"tokens": list(request.tokens)})["content"]
        return self._messages.DetokenizeResponse(content=content)

    def _loaded(self, request: Any) -> Engine:
        engine = self._engine
        if engine is None:
            raise Refused("FAILED_PRECONDITION", "model not loaded")
        asked = getattr(request, "ModelIdentity", "")
        if asked and self._identity and asked != self._identity:
            raise Refused("NOT_FOUND", f"model identity mismatch: {asked!r} asked for, {self._identity!r} loaded")
        return engine

    def _asked(self, request: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
        engine = self._loaded(request)
        if not engine.is_for_text:
            raise Refused("INVALID_ARGUMENT", "the model was loaded for embeddings: it gives no text")
        body = sampling(request)
        if request.UseTokenizerTemplate and request.Messages:
            return engine.chat, body | chat(request)
        return engine.complete, body | {"prompt": request.Prompt}

    def _reply(self, message: dict[str, Any], answer: dict[str, Any], choice: dict[str, Any]) -> Any:
        content, thought = message.get("content") or "", message.get("reasoning_content") or ""
        used, spent = answer.get("usage") or {}, answer.get("timings") or {}
        reply = self._messages.Reply(
            message=content.encode(),
            tokens=used.get("completion_tokens") or 0,
            prompt_tokens=used.get("prompt_tokens") or 0,
            timing_prompt_processing=spent.get("prompt_ms") or 0.0,
            timing_token_generation=spent.get("predicted_ms") or 0.0,
        )
        if choice.get("logprobs"):
            reply.logprobs = json.dumps(choice["logprobs"]).encode()
        calls = message.get("tool_calls") or ()
        if content or thought or calls:
            delta = reply.chat_deltas.add(content=content, reasoning_content=thought)
            for number, one in enumerate(calls):
                function = one.get("function") or {}
                delta.tool_calls.add(
                    index=one.get("index", number),
                    id=one.get("id") or "",
                    name=function.get("name") or "",
                    arguments=function.get("arguments") or "",
                )
        return reply


def _named(option: str) -> tuple[str, str]:
    name, _, value = option.partition(":")
    return name, value.partition(":")[0] or "true"


def sampling(request: Any) -> dict[str, Any]:
    """The sampling parameters in the engine's words. What is zero was not asked for, except a temperature."""
    body: dict[str, Any] = {
        "temperature": request.Temperature,
        "seed": request.Seed,
        "cache_prompt": True,
        "ignore_eos": request.IgnoreEOS,
    }
    optional = {
        "max_tokens": request.Tokens,
        "top_k": request.TopK,
        "top_p": request.TopP,
        "min_p": request.MinP,
        "typical_p": request.TypicalP,
        "repeat_penalty": request.Penalty,
        "repeat_last_n": request.Repeat,
        "frequency_penalty": request.FrequencyPenalty,
        "presence_penalty": request.PresencePenalty,
        "mirostat": request.Mirostat,
        "n_keep": request.NKeep,
        "grammar": request.Grammar,
        "stop": list(request.StopPrompts),
    }
    body |= {name: value for name, value in optional.items() if value}
    if request.LogitBias:
        body["logit_bias"] = json.loads(request.LogitBias)
    if request.Logprobs:
        is_chat = request.UseTokenizerTemplate and request.Messages
        body |= {"logprobs": True, "top_logprobs": request.TopLogprobs} if is_chat else {"logprobs": request.Logprobs}
    return body


def chat(request: Any) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for one in request.Messages:
        message: dict[str, Any] = {"role": one.role, "content": one.content}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if getattr(one, name):
                message[name] = getattr(one, name)
        if one.tool_calls:
            message["tool_calls"] = json.loads(one.tool_calls)
        messages.append(message)
    if request.Images and messages:
        last = next((one for one in reversed(messages) if one["role"] == "user"), messages[-1])
        pictures = [{"type": "image_url", "image_url": {"url": f"data:image/*;base64,{one}"}} for one in request.Images]
        last["content"] = [*pictures, {"type": "text", "text": last["content"]}]
    body: dict[str, Any] = {"messages": messages}
    if request.Tools and not request.Grammar:
        body["tools"] = json.loads(request.Tools)
        if request.ToolChoice:
            choice = json.loads(request.ToolChoice) if request.ToolChoice[:1] in '{"' else request.ToolChoice
            body["tool_choice"] = "required" if isinstance(choice, dict) else choice
    if request.Metadata.get("chat_template_kwargs"):
        body["chat_template_kwargs"] = json.loads(request.Metadata["chat_template_kwargs"])
    return body


def checked(answer: Any) -> dict[str, Any]:
    """The engine's answer, or its error as a status."""
    answer = json.loads(answer) if isinstance(answer, str | bytes) else answer
    error = answer.get("error") if isinstance(answer, dict) else None
    if error:
        statuses = {400: "INVALID_ARGUMENT", 404: "NOT_FOUND", 501: "UNIMPLEMENTED", 503: "UNAVAILABLE"}
        raise Refused(statuses.get(error.get("code"), "INTERNAL"), str(error.get("message") or error))
    return dict(answer or {})


def check_model(path: str) -> None:
    name = os.path.basename(path)
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise Refused("NOT_FOUND", f"cannot read the model file {name}: {error.strerror}") from error
    if magic != b"GGUF":
        raise Refused("INVALID_ARGUMENT", f"cannot load {name}: it is not a GGUF file")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def serve(address: str) -> None:
    import backend_pb2
    import grpc

    backend = Backend(backend_pb2)
    expected = os.environ.get("LOCALAI_GRPC_AUTH_TOKEN", "")

    def check_key(context: Any) -> None:
        given = dict(context.invocation_metadata()).get("authorization", "")
        if expected and not hmac.compare_digest(given.encode(), f"Bearer {expected}".encode()):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the key is missing or wrong")

    def refuse(context: Any, error: Exception) -> None:
        status = error.status if isinstance(error, Refused) else "INVALID_ARGUMENT"
        context.abort(getattr(grpc.StatusCode, status), str(error))

    def unary(call: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
        def answer(request: Any, context: Any) -> Any:
            check_key(context)
            try:
                return call(request)
            except (Refused, ValueError, RuntimeError) as error:
                refuse(context, error)

        return answer

    def streamed(call: Callable[[Any, Callable[[], bool]], Iterator[Any]]) -> Callable[[Any, Any], Iterator[Any]]:
        def answer(request: Any, context: Any) -> Iterator[Any]:
            check_key(context)
            try:
                yield from call(request, context.is_active)
            except (Refused, ValueError, RuntimeError) as error:
                refuse(context, error)

        return answer

    handlers = {}
    for method in backend_pb2.DESCRIPTOR.services_by_name["Backend"].methods:
        call = getattr(backend, method.name, None)
        if call is not None:
            kind = grpc.unary_stream_rpc_method_handler if method.server_streaming else None
            handlers[method.name] = (kind or grpc.unary_unary_rpc_method_handler)(
                streamed(call) if method.server_streaming else unary(call),
                request_deserializer=getattr(backend_pb2, method.input_type.name).FromString,
                response_serializer=getattr(backend_pb2, method.output_type.name).SerializeToString,
            )
    limits = [(f"grpc.max_{way}_message_length", MAX_MESSAGE_BYTES) for way in ("send", "receive")]
    # Two servers must not share a port, or one would get the requests of the other.
    server = grpc.server(ThreadPoolExecutor(CALLS), options=[*limits, ("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    try:
        bound = server.add_insecure_port(address)
    except RuntimeError:
        bound = 0
    if not bound:
        startup.leave(startup.CANNOT_BIND, f"cannot listen on {address}")
    server.start()
    print(f"listening on {address}", file=sys.stderr, flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    serve(startup.begin("grpc"))
