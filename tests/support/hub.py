"""As much of a model hub as huggingface_hub asks for: one repository, whose files are bytes in memory."""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

REPOSITORY = "owner/repository"
COMMIT = "c0ffee" + "0" * 34


@dataclass
class Hub:
    """files: name |-> bytes; sent: name |-> how many of them were sent."""

    files: dict[str, bytes] = field(default_factory=dict)
    sent: Counter[str] = field(default_factory=Counter)
    url: str = ""

    def describe(self, names: list[str]) -> list[dict[str, Any]]:
        return [{"type": "file", "path": name, "size": len(self.files[name]), "oid": COMMIT} for name in names]


@contextmanager
def serve_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0].split("/")
            if "resolve" in path:
                self._send_file(path[-1])
            elif "tree" in path:
                self._send(json.dumps(hub.describe(list(hub.files))).encode())
            else:
                self._send(json.dumps({"id": REPOSITORY, "sha": COMMIT}).encode())

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(json.dumps(hub.describe(asked["paths"])).encode())

        def _send_file(self, name: str) -> None:
            file = hub.files[name]
            begin, _, last = self.headers.get("Range", f"bytes=0-{len(file) - 1}").removeprefix("bytes=").partition("-")
            part = file[int(begin) : int(last) + 1]
            if self.command == "GET":
                hub.sent[name] += len(part)
            self._send(part, 206 if "Range" in self.headers else 200)

        def _send(self, body: bytes, code: int = 200) -> None:
            self.send_response(code)
            for name, value in {"Content-Length": len(body), "X-Repo-Commit": COMMIT, "ETag": '"x"'}.items():
                self.send_header(name, str(value))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *words: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield hub
        server.shutdown()
