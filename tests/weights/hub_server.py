"""A server that implements as much of the Hub as a push takes, and keeps what it was sent."""

import base64
import hashlib
import io
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

LFS = (".safetensors", ".bin", ".pt", ".pth", ".png", ".arrow", ".parquet")


@dataclass
class Commit:
    repository: str
    title: str
    files: dict[str, bytes]


@dataclass
class Recorded:
    """What a Hub was sent. `offered` are paths with their first bytes, which precede every
    upload."""

    commits: list[Commit] = field(default_factory=list)
    offered: dict[str, bytes] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    tokens: set[str] = field(default_factory=set)

    def of(self, repository: str) -> list[Commit]:
        return [commit for commit in self.commits if commit.repository == repository]

    def files(self, repository: str) -> dict[str, bytes]:
        """What the repository holds after all commits."""
        return {
            path: content
            for commit in self.of(repository)
            for path, content in commit.files.items()
        }


class Hub(BaseHTTPRequestHandler):
    """The routes of the Hub that a push takes, with large files by LFS."""

    def do_POST(self):
        body, path = self.body(), unquote(self.path)
        self.server.recorded.tokens.add(self.headers["Authorization"])
        if path == "/api/repos/create":
            sent = json.loads(body)
            self.reply(
                {"url": f"{self.server.url}/{sent.get('organization') or 'me'}/{sent['name']}"}
            )
        elif path == "/api/validate-yaml":
            self.reply({"errors": [], "warnings": []})
        elif found := re.fullmatch(r"/api/models/(.+)/preupload/main", path):
            self.reply({"files": [self.mode(found[1], file) for file in json.loads(body)["files"]]})
        elif re.fullmatch(r"/.+\.git/info/lfs/objects/batch", path):
            upload = [one | {"actions": {"upload": {"href": f"{self.server.url}/blobs/{one['oid']}"}}}
                      for one in json.loads(body)["objects"]]  # fmt: skip
            self.reply({"transfer": "basic", "objects": upload})
        elif found := re.fullmatch(r"/api/models/(.+)/commit/main", path):
            self.commit(found[1], [json.loads(line) for line in body.splitlines()])
        else:
            self.reply({"error": f"no route {path}"}, status=404)

    def do_PUT(self):
        oid, content = self.path.rpartition("/")[2], self.body()
        assert hashlib.sha256(content).hexdigest() == oid
        self.server.recorded.blobs[oid] = content
        self.reply({})

    def do_GET(self):
        self.reply({"error": f"no route {self.path}"}, status=404)

    def mode(self, repository: str, file: dict) -> dict:
        self.server.recorded.offered[f"{repository}/{file['path']}"] = base64.b64decode(
            file["sample"]
        )
        mode = "lfs" if file["path"].endswith(LFS) else "regular"
        return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}

    def commit(self, repository: str, lines: list[dict]):
        title = lines[0]["value"]["summary"]
        closed = repository == "me/closed" and title.startswith("Training in progress")
        if closed or repository == "me/shut":
            self.reply({"error": "no write access"}, status=403)
            return
        values = [line["value"] for line in lines[1:]]
        blobs = self.server.recorded.blobs
        files = {
            v["path"]: base64.b64decode(v["content"]) if "content" in v else blobs[v["oid"]]
            for v in values
        }
        self.server.recorded.commits.append(Commit(repository, title, files))
        self.reply({"commitUrl": f"{self.server.url}/{repository}/commit/1", "commitOid": "1"})

    def body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers["Content-Length"]))
        whole = io.BytesIO()
        while size := int(self.rfile.readline(), 16):
            whole.write(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return whole.getvalue()

    def reply(self, content: dict, status: int = 200):
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, *args):
        pass


@contextmanager
def running_hub() -> Iterator[ThreadingHTTPServer]:
    """A Hub with a `url`. What it was sent is `recorded`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.url, server.recorded = f"http://127.0.0.1:{server.server_port}", Recorded()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
