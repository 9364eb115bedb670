"""A server with the WebSocket protocol of OpenEnv, and one that misbehaves as it is asked to.

Run as a program it prints its port. It plays a guess at a number that the seed draws.
"""

import asyncio
import json
import random
import socket
import sys

import uvicorn
from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from pydantic import BaseModel, ConfigDict, ValidationError


class GuessAction(BaseModel):
    """An action; `metadata` is there in every action of OpenEnv."""

    model_config = ConfigDict(extra="forbid")
    metadata: dict = {}
    guess: int


app = FastAPI()
sessions: set[WebSocket] = set()
limit = 4


@app.websocket("/ws")
async def play(socket: WebSocket):
    await socket.accept()
    if len(sessions) >= limit:
        await socket.send_text(error("CAPACITY_REACHED", "too many"))
        await socket.close()
        return
    sessions.add(socket)
    try:
        await serve(socket)
    except WebSocketDisconnect:
        pass
    finally:
        sessions.discard(socket)


async def serve(socket: WebSocket):
    secret, fault = 0, ""
    while True:
        message = json.loads(await socket.receive_text())
        if message["type"] == "reset":
            rng = random.Random(message["data"]["seed"])
            low = rng.randint(1, 50)
            secret = rng.randint(low, low + 8)
            fault = message["data"].get("fault", "")
            await socket.send_text(observation(f"guess {low} to {low + 8}", secret))
        elif message["type"] == "close":
            return
        elif fault:
            await misbehave(socket, fault)
        else:
            await socket.send_text(answer(message["data"], secret))


def answer(data, secret):
    try:
        guess = GuessAction.model_validate(data).guess
    except ValidationError as failed:
        return error("VALIDATION_ERROR", "Invalid message", errors=json.loads(failed.json()))
    if guess == 99:
        return error("EXECUTION_ERROR", "\x1b[31m99 raises")
    hint = "right" if guess == secret else "higher" if guess < secret else "lower"
    return observation(hint, secret, reward=float(guess == secret), done=guess == secret)


def observation(text, secret, reward=None, done=False):
    shown = {"text": text, "metadata": {"even": secret % 2 == 0}}
    data = {"observation": shown, "reward": reward, "done": done, "metadata": shown["metadata"]}
    return json.dumps({"type": "observation", "data": data})


def error(code, text, **rest):
    return json.dumps({"type": "error", "data": {"message": text, "code": code, **rest}})


PLAYED = '{"type": "observation", "data": {"observation": {"text": ""}, "reward": %s}}'

BAD_ANSWERS = {
    "huge": "x" * 2_000_000,
    "text": "<html>",
    "deep": "[" * 100_000,
    "list": "[]",
    "no observation": '{"type": "observation", "data": {}}',
    "nan": PLAYED % "NaN",
    "infinite": PLAYED % "1e999",
    "words": PLAYED % '"a lot"',
}


async def misbehave(socket: WebSocket, fault):
    if fault == "silent":
        await asyncio.sleep(60)  # scenario
    elif fault == "ends":
        await socket.close()
        raise WebSocketDisconnect
    else:
        await socket.send_text(BAD_ANSWERS[fault])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        limit = int(sys.argv[1])
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("127.0.0.1", int(sys.argv[2]) if len(sys.argv) > 2 else 0))
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])
