"""An engine that tries what it should not be able to do, and what it must be able to do, and tells how each went.

It is a real backend: a tree with a run file that is started by the supervisor. It does its tries before it listens, and
tells them at `/findings`; a try is "done" or the name of the error that refused it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import msgspec

from enginehouse.core.installation import RUN_FILE, Metadata, encode_metadata

_PROGRAM = """#!%(python)s
import ctypes, errno, http.server, json, mmap, os, signal, socket, subprocess, sys, tempfile
from multiprocessing import shared_memory

targets = json.loads(%(targets)r)
libc = ctypes.CDLL(None, use_errno=True)
found = {}

def attempt(name, work):
    try:
        work()
        found[name] = "done"
    except OSError as error:
        found[name] = errno.errorcode.get(error.errno, repr(error))
    except Exception as error:
        found[name] = repr(error)

def read(path):
    with open(path, "rb") as file:
        file.read(1)

def write(path):
    with open(path, "ab") as file:
        file.write(b"#")

def call(function, *args):
    # PTRACE_SEIZE: unlike an attach it does not stop whom it traces.
    if function(*args) < 0:
        raise OSError(ctypes.get_errno(), "refused")

def truncate(path):
    os.truncate(path, 0)

def shared():
    block = shared_memory.SharedMemory(create=True, size=4096)
    block.buf[0] = 1
    block.close()
    block.unlink()

def fork():
    done = subprocess.run(["/bin/sh", "-c", "exit 7"])
    assert done.returncode == 7, done

def keep():
    place = os.path.join(os.environ["HOME"], ".cache")
    os.makedirs(place, exist_ok=True)
    write(os.path.join(place, "kernel"))
    os.rename(os.path.join(place, "kernel"), os.path.join(os.environ["HOME"], "kernel"))

def own_socket():
    with socket.socket(socket.AF_UNIX) as listening:
        path = os.path.join(tempfile.mkdtemp(), "s")
        listening.bind(path)

def reopen():
    with open("/dev/stderr", "a") as file:
        file.write("again\\n")

for name, path in targets["read"].items():
    attempt("read " + name, lambda: read(path))
for name, path in targets["write"].items():
    attempt("write " + name, lambda: write(path))
for name, path in targets["list"].items():
    attempt("list " + name, lambda: os.listdir(path))
worker = os.getppid()
attempt("read worker environ", lambda: read("/proc/%%d/environ" %% worker))
attempt("read worker mem", lambda: read("/proc/%%d/mem" %% worker))
attempt("ptrace worker", lambda: call(libc.ptrace, 0x4206, worker, None, None))
attempt("signal worker", lambda: os.kill(worker, 0))
attempt("resolve", lambda: socket.getaddrinfo("localhost", 80))
attempt("shared memory", shared)
attempt("fork", fork)
attempt("keep", keep)
attempt("temporary", lambda: tempfile.TemporaryFile().close())
attempt("socket", own_socket)
attempt("reopen", reopen)
attempt("null", lambda: write("/dev/null"))
attempt("random", lambda: read("/dev/urandom"))
attempt("cpuinfo", lambda: read("/proc/cpuinfo"))
attempt("own environ", lambda: read("/proc/self/environ"))
attempt("sys", lambda: os.listdir("/sys/class"))
attempt("model", lambda: read(json.load(open(os.environ["ENGINEHOUSE_MODEL_FILE"]))["path"]))
with open("/proc/self/status") as file:
    status = dict(line.split(":", 1) for line in file.read().splitlines() if ":" in line)
found["identity"] = [os.getuid(), os.getgid(), os.environ.get("HOME"), os.environ.get("TMPDIR"),
                     int(status["CapEff"], 16), int(status["NoNewPrivs"])]
if %(needs)r:
    open(%(needs)r).close()

class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def do_GET(self):
        content = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

host, _, port = sys.argv[2].rpartition(":")
http.server.ThreadingHTTPServer((host, int(port)), Handler).serve_forever()
"""


class Targets(msgspec.Struct):
    read: dict[str, str] = {}
    write: dict[str, str] = {}
    list: dict[str, str] = {}


def program(targets: Targets, *, python: str = sys.executable, needs: str = "") -> str:
    return _PROGRAM % {"python": python, "targets": msgspec.json.encode(targets).decode(), "needs": needs}


def write_probe(tree: Path, targets: Targets, *, python: str = sys.executable, needs: str = "") -> None:
    """`needs` is a file without which it does not start."""
    tree.mkdir(parents=True)
    (tree / RUN_FILE).write_text(program(targets, python=python, needs=needs))
    (tree / RUN_FILE).chmod(0o750)
    (tree / "metadata.json").write_bytes(encode_metadata(Metadata(name=tree.name)))


def findings(address: str) -> dict[str, Any]:
    with urlopen(f"http://{address}/findings", timeout=10) as response:
        return msgspec.json.decode(response.read(), type=dict[str, Any])
