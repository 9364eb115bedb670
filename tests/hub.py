"""A hub of models on this machine, as far as an upload needs one."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hub(ThreadingHTTPServer):
    """Keeps what is uploaded: small files in the commit, large ones by LFS.

    Attributes:
        files: content by path.
        made: repositories, as they were asked for.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Requests)
        self.files: dict[str, bytes] = {}
        self.made: list[dict] = []
        self.large: dict[str, bytes] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Requests(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None:
        """Prints nothing."""

    def answer(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, reply = 404, {}
        if self.headers.get("Authorization") != "Bearer hf_right" and "/lfs/" not in self.path:
            status, reply = 401, {"error": "Invalid username or password."}
        elif self.path == "/api/repos/create":
            self.server.made.append(json.loads(content))
            status, reply = 200, {"url": f"{self.server.url}/me/mine", "id": "me/mine"}
        elif self.path == "/api/validate-yaml":
            status, reply = 200, {"errors": [], "warnings": []}
        elif self.path.endswith("/preupload/main"):
            files = [
                {
                    "path": file["path"],
                    "shouldIgnore": False,
                    "uploadMode": "lfs" if file["path"].endswith("safetensors") else "regular",
                }
                for file in json.loads(content)["files"]
            ]
            status, reply = 200, {"files": files}
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**each, "actions": {"upload": {"href": f"{self.server.url}/lfs/{each['oid']}"}}}
                for each in json.loads(content)["objects"]
            ]
            status, reply = 200, {"transfer": "basic", "objects": objects}
        elif self.path.startswith("/lfs/"):
            self.server.large[self.path.removeprefix("/lfs/")] = content
            status = 200
        elif self.path.endswith("/commit/main"):
            for line in content.decode().splitlines():
                found = json.loads(line)
                value = found["value"]
                if found["key"] == "file":
                    self.server.files[value["path"]] = base64.b64decode(value["content"])
                elif found["key"] == "lfsFile":
                    self.server.files[value["path"]] = self.server.large[value["oid"]]
            url = f"{self.server.url}/me/mine/commit/1"
            status, reply = 200, {"commitUrl": url, "commitOid": "1", "success": True}
        body = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/vnd.git-lfs+json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT = do_HEAD = answer


@contextmanager
def open_hub() -> Iterator[Hub]:
    """Serves a hub until the block ends."""
    with Hub() as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        try:
            yield hub
        finally:
            hub.shutdown()
