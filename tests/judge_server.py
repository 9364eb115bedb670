"""A judge's server that misbehaves: overloaded, broken, and silent by a plan."""

import json
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread


class JudgeServer(ThreadingHTTPServer):
    """Speaks enough of OpenAI's interface for a judge; runs in a thread.

    Args:
        reply: what the judge says to a prompt.
        plan: how the first requests with each prompt are answered, by prompt: any of "429", "500",
            "garbage", "form", "cut" and "never"; afterwards it replies.

    Attributes:
        asked: how often each prompt came.
        seeds: of the requests, in order.
        keys: that the requests showed.
        replied: how often each prompt was replied to.
        last: after so many replies it replies to nobody; None for no end.
    """

    daemon_threads, block_on_close = True, False

    def __init__(self, reply, plan=lambda prompt: ()):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.reply, self.plan, self.last = reply, plan, None
        self.asked, self.replied, self.keys, self.seeds = Counter(), Counter(), set(), []
        self.lock, self.has_ended = Lock(), Event()
        Thread(target=self.serve_forever, daemon=True).start()

    def close(self):
        self.has_ended.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, *_):
        """Says nothing of clients that leave."""

    def choose_answer(self, prompt):
        with self.lock:
            planned = [*self.plan(prompt), "reply"]
            how = planned[min(self.asked[prompt], len(planned) - 1)]
            self.asked[prompt] += 1
            if self.last is not None and self.replied.total() >= self.last:
                return "never"
            if how == "reply":
                self.replied[prompt] += 1
            return how


class _Handler(BaseHTTPRequestHandler):
    protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

    def log_message(self, *_):
        """Prints nothing."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][0]["content"]
        self.server.keys.add(self.headers["Authorization"])
        self.server.seeds.append(body["seed"])
        how = self.server.choose_answer(prompt)
        if how == "never":
            self.server.has_ended.wait()
        elif how in ("429", "500"):
            self.answer(int(how), b'{"error": {"message": "not now"}}')
        elif how == "garbage":
            self.answer(200, b"<html>" + b"\xff" * 99)
        elif how == "cut":
            self.answer(200, b"{", size=999)
            self.close_connection = True
        else:
            text = "I cannot say." if how == "form" else self.server.reply(prompt)
            message = {"role": "assistant", "content": text}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
            reply = {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"]}
            self.answer(200, json.dumps({**reply, "choices": [choice], "usage": usage}).encode())

    def answer(self, status, content, size=None):
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Retry-After", "0.01")
        self.send_header("Content-Length", str(size or len(content)))
        self.end_headers()
        self.wfile.write(content)
