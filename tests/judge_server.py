"""A judge's server that misbehaves: late, overloaded, broken, and silent by a plan."""

import asyncio
import json
import threading
from collections import Counter

NEVER = 3600.0


class JudgeServer:
    """Speaks enough of OpenAI's interface for a judge; runs in a thread.

    Args:
        reply: what the judge says to a prompt.
        plan: how the first requests with each prompt are answered, by prompt: any of "429", "500",
            "garbage", "form", "cut" and "never"; afterwards it replies.
        seconds: how long each reply takes.

    Attributes:
        asked: how often each prompt came.
        seeds: of the requests, in order.
        replied: how often each prompt was replied to.
        most: the largest number of requests at a time.
        last: after so many replies it replies to nobody; None for no end.
    """

    def __init__(self, reply, plan=lambda prompt: (), seconds=lambda prompt: 0.0, last=None):
        self._reply, self._plan, self._seconds = reply, plan, seconds
        self.asked, self.replied, self.headers, self.seeds = Counter(), Counter(), [], []
        self.most = self._present = 0
        self.last = last
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        started.wait()

    def close(self):
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self, started):
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        started.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _serve(self, reader, writer):
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lines = dict(
                    line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line
                )
                body = json.loads(await reader.readexactly(int(lines["content-length"])))
                self.headers.append(lines)
                self._present += 1
                self.most = max(self.most, self._present)
                try:
                    if not await self._answer(body, writer):
                        return
                finally:
                    self._present -= 1
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, body, writer):
        """Whether the connection goes on."""
        prompt = body["messages"][0]["content"]
        number = self.asked[prompt]
        self.seeds.append(body["seed"])
        self.asked[prompt] += 1
        plan = self._plan(prompt)
        how = plan[number] if number < len(plan) else "reply"
        if how == "never" or (self.last is not None and self.replied.total() >= self.last):
            self._present -= 1  # whoever gave it up is not seen to have gone
            try:
                await asyncio.sleep(NEVER)
            finally:
                self._present += 1
        if how in ("429", "500"):
            self._send(writer, how, b'{"error": {"message": "not now"}}', b"retry-after: 0.01\r\n")
        elif how == "garbage":
            self._send(writer, "200", b"<html>" + b"\xff" * 99)
        elif how == "cut":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 999\r\n\r\n{")
            return False
        else:
            if how == "reply":
                self.replied[prompt] += 1
            text = "I cannot say." if how == "form" else self._reply(prompt)
            await asyncio.sleep(self._seconds(prompt))
            message = {"role": "assistant", "content": text}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
            reply = {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"]}
            self._send(writer, "200", json.dumps({**reply, "choices": [choice], "usage": usage}))
        await writer.drain()
        return True

    def _send(self, writer, status, body, more=b""):
        data = body.encode() if isinstance(body, str) else body
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n".encode() + more
        writer.write(head + f"content-length: {len(data)}\r\n\r\n".encode() + data)
