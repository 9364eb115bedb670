"""Programs of agents, good and bad. The problem's `fields` say what each does."""

import http.client
import json
import os
import random
import socket
import subprocess
import sys
import time
from contextlib import suppress
from urllib.parse import urlsplit


def connect(address):
    return http.client.HTTPConnection(urlsplit(address).netloc)


def post(address, path, body):
    connection = connect(address)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", urlsplit(address).path + path, json.dumps(body), headers)
    response = connection.getresponse()
    text = response.read()
    connection.close()
    if response.status >= 400:
        raise RuntimeError(f"status {response.status}: {json.loads(text)['error']['message']}")
    return json.loads(text or "null")


def talk(problem, address, turns=3):
    """Says in every message who it is, and checks that nobody else's answer comes."""
    name = f"{problem['id']}/{problem['place']}"
    messages = [{"role": "user", "content": f"{name} begins"}]
    for turn in range(1, turns + 1):
        reply = post(address, "/chat/completions", {"model": "m", "messages": messages})
        said = reply["choices"][0]["message"]
        messages += [said, {"role": "user", "content": f"{name} heard {said['content']}"}]
        post(address, "/info", {"turn": turn, "name": name})


def play(problem, address, key):
    what, place = problem["fields"]["what"], problem["place"]
    globals()[what[place % len(what)]](problem, address, key)


def steady(problem, address, key):
    talk(problem, address)


def late(problem, address, key):
    time.sleep(random.Random(problem["seed"]).random() / 4)
    talk(problem, address)


def cut(problem, address, key):
    """Closes its first connection amid its request."""
    parts = urlsplit(address)
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        head = f"POST {parts.path}/chat/completions HTTP/1.1\r\nHost: here\r\n"
        connection.sendall(f'{head}Content-Length: 99\r\n\r\n{{"model": "m"'.encode())
    talk(problem, address)


def crash(problem, address, key):
    talk(problem, address, 1)
    raise ValueError("nothing works")


def die(problem, address, key):
    talk(problem, address, 1)
    os.kill(os.getpid(), 9)


def hang(problem, address, key):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    talk(problem, address, 1)
    while True:
        time.sleep(1)


def flood(problem, address, key):
    while True:
        sys.stdout.write("x" * 100_000)


def hoard(problem, address, key):
    talk(problem, address, 1)
    bytearray(1 << 40)


def silent(problem, address, key):
    pass


def forge(problem, address, key):
    """Asks at another address, whose key it guesses."""
    post(address.replace(key, key[::-1]), "/chat/completions", {"model": "m", "messages": []})


def nag(problem, address, key):
    """Asks for what cannot be answered, again and again."""
    while True:
        with suppress(RuntimeError):
            post(address, "/chat/completions", {"model": "m", "messages": "?", "n": 0})
        with suppress(RuntimeError):
            post(address, "/info", {"turn": 99})


def long(problem, address, key):
    """Sends a body that is too long."""
    post(address, "/info", {"x": "y" * (17 << 20)})


def leave(problem, address, key):
    talk(problem, address, 1)
    sys.exit(3)
