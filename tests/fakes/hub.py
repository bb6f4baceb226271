"""A stand-in for the parts of the Hugging Face hub's HTTP API that are used, on this computer, with files in memory."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


class Hub:
    """Repositories of the server.

    Attributes:
        files: Content of each file, by repository and name.
        sizes: Sizes to report instead of the true ones, by name of the file.
        asked: Method and path of every request.
    """

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.sizes: dict[str, int] = {}
        self.asked: list[str] = []
        self.url = ""

    def commit(self, repository: str) -> str:
        """Return the hash of what the repository contains."""
        content = repr(sorted(self.files[repository].items())).encode()
        return hashlib.sha1(content).hexdigest()


@contextlib.contextmanager
def hub_server() -> Iterator[Hub]:
    """Run the stand-in while the body runs."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def answer(self, content: Any, status: int = 200, **headers: str) -> None:
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def missing(self, code: str) -> None:
            self.answer({"error": "not found"}, 404, X_Error_Code=code)

        def do_POST(self) -> None:
            hub.asked.append(f"POST {self.path}")
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            parts = urlsplit(self.path).path.strip("/").split("/")
            if parts[:3] == ["api", "repos", "create"]:
                asked = json.loads(body)
                name = f"{asked.get('organization') or 'me'}/{asked['name']}"
                hub.files.setdefault(name, {})
                self.answer({"url": f"{hub.url}/{name}", "name": name})
            elif parts[:2] == ["api", "validate-yaml"]:
                self.answer({"errors": [], "warnings": []})
            elif parts[4:5] == ["preupload"]:
                files = [
                    {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                    for f in json.loads(body)["files"]
                ]
                self.answer({"files": files})
            elif parts[4:5] == ["commit"]:
                name = "/".join(parts[2:4])
                for line in body.decode().splitlines():
                    operation = json.loads(line)
                    if operation["key"] == "file":
                        value = operation["value"]
                        hub.files[name][value["path"]] = base64.b64decode(value["content"])
                oid = hub.commit(name)
                self.answer({"commitOid": oid, "commitUrl": f"{hub.url}/{name}/commit/{oid}", "pullRequestUrl": None})
            else:
                self.missing("RepoNotFound")

        def do_GET(self) -> None:
            hub.asked.append(f"{self.command} {self.path}")
            parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
            is_api = parts[:2] == ["api", "models"]
            name = "/".join(parts[2:4] if is_api else parts[:2])
            if name not in hub.files:
                self.missing("RepoNotFound")
            elif is_api:
                siblings = [
                    {"rfilename": file, "size": hub.sizes.get(file, len(content))}
                    for file, content in hub.files[name].items()
                ]
                self.answer({"id": name, "modelId": name, "sha": hub.commit(name), "siblings": siblings, "tags": []})
            elif parts[2:3] == ["resolve"] and parts[4] in hub.files[name]:
                content = hub.files[name][parts[4]]
                etag = f'"{hashlib.sha1(content).hexdigest()}"'
                self.answer(content, X_Repo_Commit=hub.commit(name), ETag=etag)
            else:
                self.missing("EntryNotFound")

        do_HEAD = do_GET  # noqa: N815

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
