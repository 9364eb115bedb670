"""A server with as much of Weights & Biases' interface as its client needs to send a run."""

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class WandbServer(ThreadingHTTPServer):
    """Keeps the rows that clients send.

    Attributes:
        is_away: whether it answers every request with "503 Service Unavailable".
        refused: number of such answers.
        rows: of each run, by name, its history: one mapping per row.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler, bind_and_activate=False)
        self.is_away, self.refused = False, 0
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self._thread: Thread | None = None
        self.server_bind()  # nobody listens yet: connections are refused

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def listen(self) -> None:
        """Answers from now on."""
        self.server_activate()
        self._thread = Thread(target=self.serve_forever)
        self._thread.start()

    def stop(self) -> None:
        """Answers no more."""
        if self._thread is not None:
            self.shutdown()
            self._thread.join()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: a client that ends may leave its connections open."""

    def answer_query(self, query: str, values: dict[str, Any]) -> dict[str, Any]:
        """The data of a GraphQL query."""
        name, project = values.get("name"), values.get("project")
        owner = {"id": "RQ==", "name": "ann"}
        if "upsertBucket" in query:
            is_new = self.rows.setdefault(name, []) == []
            place = {"id": "UA==", "name": project, "entity": owner}
            bucket = {"id": "Qg==", "name": name, "displayName": name, "project": place}
            return {"upsertBucket": {"bucket": bucket, "inserted": is_new}}
        if "bucket(" in query:
            bucket = self._describe_history(name) if self.rows.get(name) else None
            return {"model": {"id": "UA==", "name": project, "entity": owner, "bucket": bucket}}
        if "createRunFiles" in query:
            files = [{"name": n, "uploadUrl": f"{self.url}/put/{n}"} for n in values["files"]]
            return {"createRunFiles": {"runID": "Qg==", "uploadHeaders": [], "files": files}}
        return {"viewer": {"id": "VQ==", "entity": "ann", "username": "ann", "flags": "{}"}}

    def _describe_history(self, name: str) -> dict[str, Any]:
        rows = self.rows[name]
        return {
            "id": "Qg==",
            "name": name,
            "displayName": name,
            "summaryMetrics": "{}",
            "config": "{}",
            "tags": [],
            "logLineCount": 0,
            "eventsLineCount": 0,
            "historyLineCount": len(rows),
            "historyTail": json.dumps([json.dumps(row) for row in rows[-1:]]),
            "eventsTail": "[]",
            "wandbConfig": '{"t": 1}',
        }

    def keep_rows(self, name: str, offset: int, lines: list[str]) -> None:
        """Keeps rows that begin at row `offset` of a run's history."""
        self.rows[name][offset : offset + len(lines)] = map(json.loads, lines)


class _Handler(BaseHTTPRequestHandler):
    server: WandbServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Prints nothing."""

    def do_GET(self) -> None:
        self._answer({})

    def do_PUT(self) -> None:
        self._read()
        self._answer({})

    def do_POST(self) -> None:
        body = self._read()
        if self.server.is_away or "/otel/" in self.path:
            self._answer({})
        elif self.path == "/graphql":
            asked = json.loads(body)
            found = self.server.answer_query(asked["query"], asked.get("variables") or {})
            self._answer({"data": found})
        else:
            files = json.loads(body).get("files") or {}
            if history := files.get("wandb-history.jsonl"):
                name = self.path.split("/")[-2]
                self.server.keep_rows(name, history["offset"], history["content"])
            self._answer({"exitcode": None, "limits": {}})

    def _read(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _answer(self, found: Any) -> None:
        self.server.refused += self.server.is_away
        self.send_response(503 if self.server.is_away else 200)
        body = json.dumps(found).encode()
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def open_wandb() -> Iterator[WandbServer]:
    """Yields a server that refuses connections until it listens."""
    with WandbServer() as server:
        try:
            yield server
        finally:
            server.stop()
