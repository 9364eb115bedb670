"""Every exit code, reached through the command line: one sentence, and no traceback."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from dashboards import START
from patience import LIMIT
from submissions import submit

from rlx.cli import main
from rlx.cli.follow import follow_run
from rlx_registry import Registry

RLCR = Path(__file__).parents[2] / "experiments" / "rlcr.yaml"
CUDA = "--set=runner.device=cuda"


@pytest.fixture
def folder(folder, monkeypatch):
    monkeypatch.setenv("RLX_HOME", "home")
    (folder / "wrong.yaml").write_text("nmae: x\n")
    (folder / "file").write_text("")
    (folder / "data.db").write_bytes(b"SQLite format 3\0" + b"junk" * 500)
    return folder


@pytest.fixture
def rlx(folder, monkeypatch, capsys):
    """Calls the command line; returns exit code, stdout and stderr."""

    def call(*arguments, **environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value.format(folder=folder))
        code = main(list(map(str, arguments)))
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return call


def recorded(folder, **payload):
    """A run that has failed."""
    with Registry.open(f"sqlite:///{folder}/home/registry.db") as registry:
        run = submit(registry)
        registry.update_run(run.id, directory=folder / "home" / "runs" / run.id)
        if payload:
            registry.results.add_event(run.id, "failed", "why", payload)
        registry.transition(run.id, {"submitted"}, "failed", "why")


# What is asked, the exit code, what is said, and what to do about it.
SITUATIONS = [
    (["validate", RLCR], {}, 0, "", ""),
    (["runs", "--stauts"], {}, 2, "No such option", "--status"),
    (["rnus"], {}, 2, "No verb 'rnus'", "Did you mean 'rlx runs'?"),
    (["train", "x.yaml"], {}, 2, "No verb 'train'", "Did you mean 'rlx submit'?"),
    (["show", "r-0001"], {}, 2, "No verb 'show'", "Did you mean 'rlx validate --values'?"),
    (["plugins", "shw"], {}, 2, "No such command 'shw'", ""),
    (["submit", "wrong.yaml"], {}, 2, "unknown key 'nmae'", "did you mean 'name'?"),
    (["submit", "none.yaml"], {}, 2, "cannot read none.yaml", "No such file"),
    (["runs"], {}, 2, "there is no registry of runs at home/registry.db", "submit an experiment"),
    (["submit", RLCR, "--set=task.plugin=no"], {}, 3, "no task plugin named 'no'", "installed:"),
    (["submit", RLCR, CUDA], {}, 4, "needs a CUDA device", "device=cpu"),
    (["submit", RLCR], {"RLX_HOME": "file/x"}, 4, "cannot be a folder", "set RLX_HOME"),
    (["submit", RLCR], {"RLX_HOME": "what?"}, 4, "cannot be used in a database URL", "another"),
    (["runs"], {"RLX_REGISTRY": "sqlite:///{folder}/data.db"}, 5, "data.db", ""),
    (["runs"], {"RLX_REGISTRY": "postgresql:///x?host=/nowhere"}, 5, "/nowhere", ""),
    (["runs"], {"RLX_REGISTRY": "mysql:///x"}, 5, "PostgreSQL", ""),
    # 2 wins where kinds mix.
    (
        ["submit", RLCR, CUDA, "--set=loss.clip=no"],
        {}, 2, "loss.clip", "",
    ),
    (
        ["submit", RLCR, CUDA, "--set=rewards.global={accuracy: {plugin: countdown}}"],
        {}, 2, "has the name of a turn reward", "rename one of them",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "environment", "code", "said", "advice"), SITUATIONS)
def test_one_clear_answer_with_the_exit_code_of_its_kind(
    asked, environment, code, said, advice, folder, rlx
):
    before = {path.name for path in folder.iterdir()}
    got, out, err = rlx(*asked, **environment)
    assert got == code, err
    assert said in err
    assert advice in err
    if code:
        assert out == ""
        assert err.startswith(("error: ", "Usage: "))
    assert {path.name for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("asked", "environment", "code", "kind"),
    [
        (["runs", "--json", "--status", "no"], {}, 2, "usage"),
        (["status", "latest", "--json"], {}, 2, "SpecError"),
        (["runs", "--json"], {"RLX_REGISTRY": "sqlite:///{folder}/data.db"}, 5, "RegistryError"),
        (["runs", "--json"], {"RLX_HOME": "what?"}, 4, "EnvironmentFault"),
    ],
)
def test_json_gives_the_envelope(asked, environment, code, kind, rlx):
    got, out, err = rlx(*asked, **environment)
    told = json.loads(out)["error"]
    assert (got, told["exit_code"], told["kind"], err) == (code, code, kind, "")
    assert told["message"]


@pytest.mark.parametrize(
    ("payload", "code"), [({}, 1), ({"exit_code": 3}, 3), ({"exit_code": 4}, 4)]
)
def test_a_failed_run_ends_with_the_exit_code_of_its_failure(payload, code, folder, rlx, capsys):
    recorded(folder, **payload)
    url = f"sqlite:///{folder}/home/registry.db"
    assert follow_run("r-0001", url) == code
    capsys.readouterr()
    if payload:
        status = json.loads(rlx("status", "1", "--json")[1])
        assert (status["status"], status["exit_code"]) == ("failed", code)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_output_to_a_full_disk(folder):
    recorded(folder)
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*START, "runs", "--json"],
            cwd=folder,
            env={**os.environ, "RLX_HOME": str(folder / "home")},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 4
    assert done.stderr == ("error: disk full while writing output: free some space on that disk\n")


def test_a_taken_port_is_named(folder, rlx):
    recorded(folder)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, out, err = rlx("web", "--port", port)
    assert (code, out) == (4, "")
    assert err.splitlines(keepends=True)[-1] == (
        f"error: port {port} on 127.0.0.1 is in use; choose another with --port\n"
    )


ASKING = """
import signal, sys, time, weakref
import click, rlx.cli
import rlx.cli.verb_group as group
{asking}
group.rlx_command = click.Command("ask", callback=ask)
sys.exit(rlx.cli.main([]))
"""
IGNORED = """
class Lock: ...

def ask():
    lock = Lock()
    kept = weakref.ref(lock, lambda _: signal.raise_signal(signal.SIGINT))
    del lock
    print("asked", flush=True)
    while True:
        time.sleep(3600)
"""
"""By Python: one raised in a weak reference's callback, of which each import has one."""
TURNED = """
def ask():
    print("asked", flush=True)
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        raise ValueError("Error building a validator") from None
"""
"""Into another error, by compiled code."""


@pytest.mark.parametrize("asking", [IGNORED, TURNED], ids=["ignored", "turned"])
def test_an_interrupt_is_told_once_whoever_swallows_it(asking, folder):
    done = subprocess.run(
        [sys.executable, "-c", ASKING.format(asking=asking)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert (done.returncode, done.stdout) == (130, "asked\n")
    assert done.stderr.split() == ["interrupted"]
