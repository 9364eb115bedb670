"""`rlx web` as a command: who is let in from this machine and from others."""

import os
import re
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from contextlib import contextmanager

import psutil
from dashboards import START
from patience import LIMIT, find_free_port, stop_process, wait_until

TOKEN = "a-token-of-some-length"


@contextmanager
def serve_web(folder, *arguments, **environment):
    """`rlx web`, and its address on this machine."""
    port = find_free_port()
    process = subprocess.Popen(
        [*START, "web", "--port", str(port), *arguments],
        cwd=folder,
        env={**os.environ, "RLX_HOME": str(folder), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        stop_process(process)


def test_a_random_token_is_needed(tmp_path, registry):
    """Also on this machine, which others may use."""
    with serve_web(tmp_path) as (process, bare):
        lines = iter(process.stderr.readline, "")
        link = next(filter(None, (re.search(r"dashboard on (\S+)", line) for line in lines)))[1]
        token = link.removeprefix(f"{bare}/?token=")
        assert len(token) >= 32
        for path in ("/", "/.json", "/static/chart.js", "/openapi.json"):
            status, said, _ = fetched(f"{bare}{path}")
            assert (status, "printed its address with the token" in said) == (401, True)
        assert fetched(f"{bare}/", Authorization=f"Bearer {token}")[0] == 200
        assert token not in "".join(psutil.Process(process.pid).cmdline())


def fetched(url, **headers):
    request = urllib.request.Request(url, headers=headers)

    def ask():
        try:
            with urllib.request.urlopen(request, timeout=LIMIT) as response:
                return response.status, response.read().decode(), response.headers
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode(), error.headers
        except urllib.error.URLError:
            return None

    return wait_until("an answer", ask)


def break_off_form(url):
    """Sends the first part of a form, and hangs up."""
    name, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((name, int(port)), timeout=LIMIT) as sending:
        sending.sendall(
            b"POST /runs/1/stop HTTP/1.1\r\nHost: localhost\r\n"
            b"Authorization: Bearer " + TOKEN.encode() + b"\r\n"
            b"Content-Length: 100\r\n\r\nwrite"
        )


def test_the_command_serves_those_who_show_it(tmp_path, registry):
    others = ("--host", "0.0.0.0", "--name", "Team.example")
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    with serve_web(tmp_path, *others, RLX_WEB_TOKEN=TOKEN) as (process, url):
        status, _, headers = fetched(f"{url}/")
        assert status == 401
        assert "server" not in {name.lower() for name in headers}
        assert fetched(f"{url}/", **bearer)[0] == 200
        assert fetched(f"{url}/", **bearer, Host="team.example:80")[0] == 200
        assert fetched(f"{url}/", **bearer, Host="evil.example")[0] == 400
        break_off_form(url)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT)
        assert process.returncode == 130
        assert TOKEN not in out + err and "Traceback" not in err
