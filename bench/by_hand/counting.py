"""A TCP proxy that counts what comes from the server, for benchmarks of what is really transferred."""

from __future__ import annotations

import contextlib
import socket
import threading


class CountingProxy:
    """Forwards connections to `upstream` (host:port). `sent_bytes` grows as the server's bytes are passed on."""

    def __init__(self, upstream: str) -> None:
        host, _, port = upstream.rpartition(":")
        self._upstream = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.sent_bytes = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._upstream)
            threading.Thread(target=self._pass, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pass, args=(server, client, True), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, is_counted: bool) -> None:
        try:
            while content := source.recv(256 * 1024):
                if is_counted:
                    with self._lock:
                        self.sent_bytes += len(content)
                sink.sendall(content)
        except OSError:
            pass
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
