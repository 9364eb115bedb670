"""The light verbs: what they print, their exit codes, and what they never import."""

import json
import os
import subprocess

import pytest
from dashboards import START
from guests import installed

from rlx.cli import main

GOOD = """\
name: guest
model: {kind: tiny}
task: {plugin: cli.sums}
rewards: {turn: {accuracy: {plugin: cli.exact, turn: answer}}}
phases: [{name: all, steps: 3}]
"""
MODULE = '''
from rlx.plugin import Plugin, reward

class Sums(Plugin):
    """Adds numbers."""
    limit: int = 9
    def problem(self, split, index, seed): ...
    def demonstration(self, problem, seed): ...

@reward
def exact(sample, *, strict: bool = True):
    """1 when right."""
    return 1.0
'''
POINTS = """
[rlx.tasks]
cli.sums = cli_guest:Sums
[rlx.rewards]
cli.exact = cli_guest:exact
cli.broken = cli_missing:gone
"""


@pytest.fixture(autouse=True)
def guest(folder, monkeypatch):
    (folder / "good.yaml").write_text(GOOD)
    (folder / "typo.yaml").write_text(GOOD.replace("steps", "stps"))
    (folder / "nobody.yaml").write_text(GOOD.replace("cli.sums", "cli.sms"))
    monkeypatch.delenv("RLX_DEBUG", raising=False)
    with installed(folder, monkeypatch, "rlx-cli-guest", POINTS, cli_guest=MODULE):
        yield


def test_exit_codes_and_every_file(capsys, subtests):
    for files, code in (
        (["good.yaml"], 0),
        (["typo.yaml"], 2),
        (["nobody.yaml"], 3),
        (["nobody.yaml", "typo.yaml", "good.yaml"], 2),
        (["missing.yaml"], 2),
    ):
        with subtests.test(files=files, code=code):
            assert main(["validate", *files]) == code
            out, err = capsys.readouterr()
            assert all(name in out + err for name in files)
            assert ("good.yaml: ok" in out) == ("good.yaml" in files)
            assert ("error:" in err) == (code > 0)
            assert "submitted" not in err, "nobody asked for a run"


def test_json_has_every_fault_and_its_place(capsys):
    assert main(["validate", "--json", "good.yaml", "typo.yaml"]) == 2
    good, typo = json.loads(capsys.readouterr().out)["files"]
    assert good["ok"]
    assert len(good["digest"]) == 16
    assert [d["path"] for d in typo["diagnostics"]] == ["phases.0.stps"]
    assert typo["diagnostics"][0]["position"]["line"] == 5


def test_show_gives_each_value_its_origin(capsys):
    assert main(["validate", "--values", "good.yaml", "--set", "seed=4"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["seed", "4", "#", "--set"] in rows
    assert ["name", '"guest"', "#", "good.yaml:1"] in rows
    assert ["task.limit", "9", "#", "plugin", "default"] in rows
    assert ["runner.ranks", "1", "#", "default"] in rows


def test_warnings_stop_nothing(capsys):
    one = "rollout={schedule: single, answer: {top_k: 5}}"
    assert main(["validate", "good.yaml", "--set", one]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("good.yaml: ok")
    assert "warning: rollout.answer.top_k is 5" in err
    assert "--> <override>:1:44" in err


def test_schema_knows_the_installed_plugins(capsys):
    assert main(["validate", "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert "cli.exact" in schema["$defs"]["TurnReward"]["properties"]["plugin"]["examples"]
    assert "extends" in schema["properties"]


def test_a_broken_plugin_is_a_row(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["plugins"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert rows["cli.exact"].split()[1:] == ["reward", "rlx-cli-guest", "1.0", "1", "ok"]
    assert "broken: ModuleNotFoundError: No module named 'cli_missing'" in rows["cli.broken"]


def raising(error):
    def verb(*_, **__):
        raise error

    return verb


def test_a_surprise_is_one_line_and_the_traceback_is_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("rlx.cli.validate.check_file", raising(ZeroDivisionError("by\x1b zero")))
    assert main(["validate", "good.yaml"]) == 1
    err = capsys.readouterr().err
    assert "ZeroDivisionError: by\\x1b zero" in err
    assert "Traceback" not in err
    assert "ZeroDivisionError" in (tmp_path / "home/last-error.txt").read_text()
    monkeypatch.setenv("RLX_DEBUG", "1")
    assert main(["validate", "good.yaml"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_reader_that_leaves_is_told_nothing(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*START, "validate", "--schema"],
        stdout=writing,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        check=False,
    )
    os.close(writing)
    assert done.returncode == 1
    assert done.stderr == b""
