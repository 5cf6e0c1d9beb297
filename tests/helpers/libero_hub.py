"""A local HTTP server with the few endpoints of a Hugging Face hub that a download uses."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

REPO = "someone/assets"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Serves one dataset.

    Attributes:
        files: Content by path. Files that end in .xml are kept by git, others as large files.
        cuts: Path -> bytes after which the connection breaks, and how often it does.
        gets: Range headers of the requests for each file's content.
    """

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = files
        self.cuts = dict[str, tuple[int, int]]()
        self.gets = dict[str, list[str | None]]()
        self.calls: Counter[str] = Counter()
        self.lock = threading.Lock()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def stop(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join(5)


def etag(name: str, data: bytes) -> str:
    if name.endswith(".xml"):
        return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
    return hashlib.sha256(data).hexdigest()


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        content = f"/datasets/{REPO}/resolve/{COMMIT}/"
        if path in [f"/api/datasets/{REPO}/revision/{name}" for name in ("main", COMMIT)]:
            siblings = [{"rfilename": name} for name in self.server.files]
            self._json({"id": REPO, "sha": COMMIT, "siblings": siblings})
        elif path == f"/api/datasets/{REPO}/tree/{COMMIT}":
            self._json(self._tree())
        elif path.startswith(content) and path.removeprefix(content) in self.server.files:
            self._file(path.removeprefix(content), body)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _tree(self) -> list[dict[str, Any]]:
        tree: list[dict[str, Any]] = [{"type": "directory", "path": "scenes", "oid": "0" * 40}]
        for name, data in self.server.files.items():
            entry: dict[str, Any] = {"type": "file", "path": name, "size": len(data)}
            if name.endswith(".xml"):
                entry["oid"] = etag(name, data)
            else:
                large = {"oid": etag(name, data), "size": len(data), "pointerSize": 130}
                entry |= {"oid": "1" * 40, "lfs": large}
            tree.append(entry)
        return tree

    def _json(self, value: Any) -> None:
        data = json.dumps(value).encode()
        with self.server.lock:
            self.server.calls["api"] += 1
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _file(self, name: str, body: bool) -> None:
        hub = self.server
        data, asked = hub.files[name], self.headers.get("Range")
        start = int(asked.removeprefix("bytes=").split("-")[0]) if asked and body else 0
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{etag(name, data)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(data) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if not body:
            return
        with hub.lock:
            hub.gets.setdefault(name, []).append(asked)
            after, times = hub.cuts.get(name, (0, 0))
            if times > 0:
                hub.cuts[name] = (after, times - 1)
        if times > 0:
            self.wfile.write(data[start:after])
            self.wfile.flush()
            self.close_connection = True  # before the promised length: the client sees a cut
        else:
            self.wfile.write(data[start:])
