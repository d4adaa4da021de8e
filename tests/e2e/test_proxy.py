"""The recipe of docs/network.md: nginx with TLS in front of a frontend, as a browser, a client, the command line and a
worker meet it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.conftest import PROGRAM, Cluster, Program, wait_for
from tests.ports import free_port

DOCUMENT = Path(__file__).parents[2] / "docs/network.md"
LIMIT_SECONDS = 60.0


class Proxy:
    """A running nginx with the configuration that the document shows, its addresses replaced."""

    def __init__(self, root: Path, behind: str) -> None:
        self.authority = root / "tls.crt"
        self.port = free_port()
        self.host = f"127.0.0.1:{self.port}"
        self.url = f"https://{self.host}"
        key = root / "tls.key"
        subject = ("-subj", "/CN=proxy", "-addext", "subjectAltName=IP:127.0.0.1")
        openssl = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *subject]
        subprocess.run([*openssl, "-keyout", key, "-out", self.authority], check=True, capture_output=True)
        recipe = re.search(r"```nginx\n(server \{.*?\n\})\n```", DOCUMENT.read_text(), re.DOTALL)
        assert recipe is not None
        server = (
            recipe[1]
            .replace("listen 443 ssl", f"listen {self.host} ssl")
            .replace("/etc/ssl/engines.example.org.crt", str(self.authority))
            .replace("/etc/ssl/engines.example.org.key", str(key))
            .replace("http://127.0.0.1:8080", behind)
        )
        scratch = "".join(
            f"{kind}_temp_path {root}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        main = root / "nginx.conf"
        main.write_text(f"pid {root}/nginx.pid; events {{}} http {{ access_log off; {scratch}\n{server}\n}}\n")
        program = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
        assert program is not None, "nginx is missing"
        self._log = (root / "nginx.log").open("wb")
        self._process = subprocess.Popen(
            [program, "-c", main, "-e", root / "nginx.err", "-g", "daemon off;"], stderr=self._log, stdout=self._log
        )
        self.context = ssl.create_default_context(cafile=str(self.authority))

    def end(self) -> None:
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(20)
        self._log.close()

    def ask(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, str]:
        connection = HTTPSConnection(self.host, timeout=20, context=self.context)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"content-type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read() or b"null"), answer.headers.get("set-cookie", "")
        finally:
            connection.close()


@pytest.fixture(scope="module")
def proxy(cluster: Cluster) -> Iterator[Proxy]:
    made = Proxy(cluster.root, cluster.url)
    try:
        wait_for("nginx to listen", lambda: _answers(made), 20)
        yield made
    finally:
        made.end()


def _answers(proxy: Proxy) -> bool:
    try:
        return proxy.ask("GET", "/healthz")[0] == 200
    except OSError:
        return False


def admin(cluster: Cluster) -> dict[str, str]:
    return {"authorization": "Bearer " + (cluster.data / "admin.token").read_text().strip()}


def test_whoever_comes_through_the_proxy_needs_a_token(cluster: Cluster, proxy: Proxy) -> None:
    assert proxy.ask("GET", "/v1/models")[0] == 401
    assert proxy.ask("GET", "/v1/models", headers={"authorization": "Bearer sk-of-another-program"})[0] == 401
    assert proxy.ask("GET", "/v1/models", headers=admin(cluster))[0] == 200


def test_a_browser_signs_in_and_its_cookie_is_for_https_alone(cluster: Cluster, proxy: Proxy) -> None:
    code = cluster.cli("login-link").stdout.strip().rpartition("/")[2]
    page = {"origin": proxy.url, "host": proxy.host}
    status, _, cookie = proxy.ask("POST", "/api/session", {"code": code}, page)
    assert status == 201
    assert {"Secure", "HttpOnly", "SameSite=Strict"} <= {part.strip() for part in cookie.split(";")}
    signed_in = {"cookie": cookie.partition(";")[0]}
    assert proxy.ask("POST", "/api/nodes/first/resume", {}, page | signed_in)[0] == 200
    other = {"origin": "https://elsewhere.example.org", "host": proxy.host}
    assert proxy.ask("POST", "/api/nodes/first/resume", {}, other | signed_in)[0] == 403
    assert proxy.ask("DELETE", "/api/session", None, page | signed_in)[0] == 204


def test_events_and_tokens_arrive_when_they_are_sent(cluster: Cluster, proxy: Proxy) -> None:
    cluster.cli("models", "load", "tiny-chat")
    with _opened(cluster, proxy, "/api/events") as events:
        assert events.readline().startswith(b"event: hello")  # an idle stream ends with nothing that would flush it
    chat = {
        "model": "tiny-chat",
        "stream": True,
        "max_tokens": 400,
        "ignore_eos": True,
        "messages": [{"role": "user", "content": "Tell me a story."}],
    }
    with _opened(cluster, proxy, "/v1/chat/completions", chat) as answer:
        first = answer.read1()
        assert first.startswith(b"data:")
        assert b"[DONE]" not in first, "the tokens came in one piece"
        assert answer.read().endswith(b"data: [DONE]\n\n")


def _opened(cluster: Cluster, proxy: Proxy, path: str, body: object = None) -> Any:
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(proxy.url + path, content, admin(cluster) | {"content-type": "application/json"})
    return urllib.request.urlopen(request, timeout=LIMIT_SECONDS, context=proxy.context)


def test_the_command_line_and_a_worker_use_the_address_of_the_proxy(cluster: Cluster, proxy: Proxy) -> None:
    trusting = {"SSL_CERT_FILE": str(proxy.authority)}
    token = (cluster.data / "admin.token").read_text().strip()
    command = [PROGRAM, "--url", proxy.url, "--data", str(cluster.root / "laptop"), "nodes", "list"]
    environment = {**os.environ, "ENGINEHOUSE_TOKEN": token}
    refused = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (refused.returncode, "Traceback" in refused.stderr) == (4, False)
    assert "its certificate is not trusted on this machine" in refused.stderr
    assert "SSL_CERT_FILE" in refused.stderr
    listed = subprocess.run(command, capture_output=True, text=True, env=environment | trusting)
    assert (listed.returncode, "first" in listed.stdout) == (0, True), listed.stderr

    join = ("join", proxy.url, "--name", "second", "--data", str(cluster.root / "second"))
    join_token = (cluster.data / "join.token").read_text().strip()
    log = cluster.root / "second.log"
    cluster.workers["second"] = Program(*join, log=log, environment={"ENGINEHOUSE_TOKEN": join_token, **trusting})
    cluster.wait_for_status("second", "pending")
    cluster.cli("nodes", "approve", "second")
    cluster.wait_for_status("second", "healthy")
    assert cluster.node("second")["address"].startswith("127.0.0.1:")
