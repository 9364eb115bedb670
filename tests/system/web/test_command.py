"""`rlx web` as a command: who is let in from this machine and from others."""

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import psutil
import pytest
from patience import LIMIT, find_free_port, stop_process, wait_until

TOKEN = "a-token-of-some-length"
MAIN = "import sys; from rlx.cli import main; sys.exit(main())"


@pytest.fixture
def unused_port():
    """Of this machine."""
    return find_free_port()


def command(folder, *arguments, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", MAIN, "web", *arguments],
        cwd=folder,
        env={**os.environ, "RLX_HOME": str(folder), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def server(tmp_path, registry, unused_port):
    """`rlx web` that lets other machines in."""
    process = command(
        tmp_path, "--host", "0.0.0.0", "--port", str(unused_port), "--name", "Team.example",
        RLX_WEB_TOKEN=TOKEN,
    )  # fmt: skip
    yield f"http://127.0.0.1:{unused_port}", process
    stop_process(process)


@pytest.mark.parametrize("arguments", [[], ["--no-token"]])
def test_a_random_token_is_needed_unless_that_is_switched_off(
    tmp_path, registry, unused_port, arguments
):
    """Also on this machine, which others may use."""
    process = command(tmp_path, "--port", str(unused_port), *arguments)
    try:
        lines = iter(process.stderr.readline, "")
        link = next(filter(None, (re.search(r"dashboard on (\S+)", line) for line in lines)))[1]
        bare = f"http://127.0.0.1:{unused_port}"
        if arguments:
            assert link == bare
            assert fetched(f"{bare}/")[0] == 200
        else:
            token = link.removeprefix(f"{bare}/?token=")
            assert len(token) >= 32
            for path in ("/", "/.json", "/static/chart.js", "/openapi.json"):
                status, said, _ = fetched(f"{bare}{path}")
                assert (status, "printed its address with the token" in said) == (401, True)
            assert fetched(f"{bare}/", Authorization=f"Bearer {token}")[0] == 200
            assert token not in "".join(psutil.Process(process.pid).cmdline())
    finally:
        stop_process(process)


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


def test_the_command_serves_those_who_show_it(server):
    url, process = server
    status, _, headers = fetched(f"{url}/")
    assert status == 401
    assert "server" not in {name.lower() for name in headers}
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    assert fetched(f"{url}/", **bearer)[0] == 200
    assert fetched(f"{url}/", **bearer, Host="team.example:80")[0] == 200
    assert fetched(f"{url}/", **bearer, Host="evil.example")[0] == 400
    assert fetched(f"{url}/static/chart.js")[0] == 401
    break_off_form(url)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 130
    assert TOKEN not in out + err and "Traceback" not in err
