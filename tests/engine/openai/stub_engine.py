"""An engine that speaks OpenAI's HTTP API, with the behaviour of `tests.engine.localai.stub_backend` before it listens.

`write_tree(directory, **behaviour)` makes an installed backend of it. It checks its key, tells its process id as an
answer, and with `die_on_request` ends when it is asked. With `reads` it tells its context size, how much of its model
it can read, and how much of these files. As a program it imports nothing else of the project.
"""

from __future__ import annotations

import http.server
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def write_tree(tree: Path, **behaviour: object) -> Path:
    """An installed backend that declares its protocol."""
    from tests.engine.localai import stub_backend

    tree.mkdir(parents=True)
    program = tree / "run.sh"
    program.write_text(f"#!{sys.executable}\n" + Path(__file__).read_text())
    program.chmod(0o755)
    (tree / "stub_backend.py").write_text(Path(stub_backend.__file__).read_text())
    (tree / "behaviour.json").write_text(json.dumps(behaviour))
    (tree / "metadata.json").write_text(json.dumps({"name": tree.name, "protocol": "openai-http"}))
    return tree


def _readable(path: str) -> int:
    """How many bytes of a file can be read; -1 if it cannot be opened."""
    try:
        return len(Path(path).read_bytes())
    except OSError:
        return -1


def main() -> None:
    here = Path(__file__).parent
    sys.path.insert(0, str(here))
    import stub_backend  # type: ignore[import-not-found]  # beside it in the tree

    behaviour: dict[str, Any] = json.loads((here / "behaviour.json").read_text())
    key = json.loads(Path(os.environ["ENGINEHOUSE_MODEL_FILE"]).read_text())["key"]
    stub_backend.begin(behaviour)
    described = json.loads(Path(os.environ["ENGINEHOUSE_MODEL_FILE"]).read_text())

    class Answers(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Its log is the business of tests."""

        def tell(self, status: int, body: object) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            self.tell(503 if behaviour.get("never_ready") else 200, {"status": "ok"})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"] or 0))
            if self.headers.get("authorization") != f"Bearer {key}" and not behaviour.get("ignores_key"):
                return self.tell(401, {"error": {"message": "wrong key"}})
            if behaviour.get("die_on_request"):
                os._exit(4)
            time.sleep(float(behaviour.get("answer_seconds", 0)))
            said: object = os.getpid()
            if behaviour.get("reads"):
                said = {"context": described["context"], "read": _readable(described["path"])}
                said["others"] = [_readable(one) for one in behaviour["reads"]]
            message = {"role": "assistant", "content": json.dumps(said)}
            self.tell(200, {"object": "chat.completion", "choices": [{"index": 0, "message": message}]})

    host, _, port = sys.argv[sys.argv.index("--addr") + 1].rpartition(":")
    try:
        server = http.server.ThreadingHTTPServer((host.strip("[]"), int(port)), Answers)
    except OSError:
        os._exit(98)
    stub_backend.is_listening(behaviour)
    server.serve_forever()


if __name__ == "__main__":
    main()
