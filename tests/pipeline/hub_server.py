"""A hub on loopback: the few answers of its HTTP API that listing and fetching a model need."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

REPO = "someone/tiny"


class Hub:
    """One model repository. commits: commit -> files; branches: name -> commit; wrong: bytes sent instead, by name.

    asked: method, path and range of every request so far.
    """

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, bytes]] = {}
        self.branches: dict[str, str] = {}
        self.wrong: dict[str, bytes] = {}
        self.gated = False
        self.asked: list[tuple[str, str, str | None]] = []
        self.url = ""

    def push(self, branch: str, files: dict[str, bytes]) -> str:
        """A new commit at the head of a branch."""
        commit = hashlib.sha1(json.dumps({name: _sha(data) for name, data in files.items()}).encode()).hexdigest()
        self.commits[commit] = files
        self.branches[branch] = commit
        return commit

    def downloads(self) -> list[str]:
        """Names of the files that were asked for whole."""
        return [path.rsplit("/", 1)[-1] for method, path, part in self.asked if method == "GET" and part is None
                and "/resolve/" in path]  # fmt: skip


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body, path, part = self.command == "GET", unquote(urlsplit(self.path).path), self.headers.get("Range")
            hub.asked.append((self.command, path, part))
            parts = path.strip("/").split("/")
            api = parts[:2] == ["api", "models"]
            repo, rest = ("/".join(parts[2:4]), parts[4:]) if api else ("/".join(parts[:2]), parts[2:])
            if repo != REPO or len(rest) < 2:
                return self._refuse(404, "RepoNotFound")
            if hub.gated:
                return self._refuse(403, "GatedRepo")
            commit = hub.branches.get(rest[1], rest[1])
            if commit not in hub.commits:
                return self._refuse(404, "RevisionNotFound")
            files = hub.commits[commit]
            if api:
                listed = [_entry(name, data) for name, data in files.items()]
                if rest[0] == "tree":
                    return self._send(json.dumps(listed).encode(), {"Content-Type": "application/json"}, body)
                siblings = [
                    {"rfilename": one["path"], "size": one["size"], "blobId": one["oid"], "lfs": _lfs(one)}
                    for one in listed
                ]
                info = {"id": REPO, "modelId": REPO, "sha": commit, "siblings": siblings, "tags": []}
                return self._send(json.dumps(info).encode(), {"Content-Type": "application/json"}, body)
            if rest[2] not in files:
                return self._refuse(404, "EntryNotFound")
            data, entry = files[rest[2]], _entry(rest[2], files[rest[2]])
            etag = entry["lfs"]["oid"] if "lfs" in entry else entry["oid"]
            headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
            self._send(hub.wrong.get(rest[2], data) if body else data, headers, body, part)

        do_GET = do_HEAD = _answer  # noqa: N815

        def _refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _send(self, data: bytes, headers: dict[str, str], body: bool, part: str | None = None) -> None:
            if part is not None:
                first, last = part.removeprefix("bytes=").split("-")
                data = data[int(first) : int(last) + 1 if last else None]
            self.send_response(200 if part is None else 206)
            for key, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(key, value)
            self.end_headers()
            if body:
                self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _entry(name: str, data: bytes) -> dict[str, Any]:
    entry = {"type": "file", "path": name, "size": len(data)}
    entry["oid"] = hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
    if name.endswith(".safetensors"):
        entry["lfs"] = {"oid": _sha(data), "size": len(data), "pointerSize": 130}
    return entry


def _lfs(entry: dict[str, Any]) -> dict[str, Any] | None:
    lfs = entry.get("lfs")
    return lfs and {"sha256": lfs["oid"], "size": lfs["size"], "pointerSize": 130}
