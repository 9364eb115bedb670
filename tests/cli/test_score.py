"""`rlx score` as it is called: any reward on a file, each line with a verdict or a reason."""

import json
import subprocess
from types import SimpleNamespace

import pytest
from dashboards import START
from guests import installed

from rlx.cli import main

GUEST = '''
import time
from rlx.plugin import Reward, reward

@reward
def moody(sample, *, patience: int = 60):
    """Does what the response says."""
    if sample.response == "hang":
        time.sleep(patience)  # scenario
    if sample.response == "die":
        import os
        os._exit(3)
    if sample.response == "abstain":
        return None
    if sample.response == "raise":
        return 1 / 0
    return float("nan") if sample.response == "nan" else 0.5

@reward(scope="siblings")
def rank(samples):
    """Place by length."""
    order = sorted(len(sample.response) for sample in samples)
    return [float(order.index(len(sample.response))) for sample in samples]

@reward
def seen(sample):
    """What the sample holds."""
    from rlx.plugin import Score
    parts = {name: float(len(text)) for name, text in sample.spans.items()}
    parts |= {"number": float(sample.number), "tokens": float(sample.n_tokens)}
    parts |= {"info": float(len(sample.info)), "fields": float(len(sample.problem))}
    return Score(0.0, f"{sample.turn} {sorted(sample.problem)}", parts)

class lacking(Reward):
    """Reads a file that is not there."""
    def check(self):
        open("/nowhere/at-all")
    def score(self, sample):
        return 1.0
'''
RIGHT = {"response": "<answer>3+4</answer>", "numbers": [3, 4], "target": 7}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a distribution of rewards, one of which does not import."""
    points = [f"{name} = rlx_guest:{name}" for name in ("moody", "rank", "seen", "lacking")]
    points = "\n".join(["[rlx.rewards]", *points, "broken = rlx_broken:broken", ""])
    modules = {"rlx_guest": GUEST, "rlx_broken": "import no_such_module\n"}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLX_HOME", str(tmp_path / "home"))
    with installed(tmp_path, monkeypatch, "rlx-guest", points, **modules):
        yield tmp_path


@pytest.fixture
def rlx(capfdbinary):
    """Calls `rlx score`; returns its exit code and what it printed."""

    def call(*arguments):
        capfdbinary.readouterr()
        code = main(["score", *map(str, arguments)])
        out, err = capfdbinary.readouterr()
        return SimpleNamespace(returncode=code, stdout=out, stderr=err)

    return call


def written(folder, *records):
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    path = folder / "lines.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def scored(done):
    return [json.loads(line) for line in done.stdout.split(b"\n") if line]


def test_what_cannot_be_scored_stops_nothing(folder, rlx):
    deep = "[" * 100_000
    long = '{"response": "x", "n": ' + "9" * 5000 + "}"
    broken = [
        ("{", "not JSON"),
        (deep, "not JSON"),
        (long, "not JSON"),
        ("[1]", "not a JSON object"),
        ({"numbers": [3, 4]}, "`response` is missing"),
        ({"response": None}, "'response' must be text"),
        ({"response": "x", "turn": 3}, "'turn' must be text, not 3"),
        ({"response": "x", "of": "y"}, "'of' must be a number"),
        ({"response": "x", "context": {"a": 1}}, "under `problem`"),
        ({"response": "hang"}, "deadline of 3 s passed"),
        ({"response": "die"}, "process died (exit code 3)"),
        ({"response": "raise"}, "ZeroDivisionError"),
        ({"response": "nan"}, "gave nan"),
        ({"response": "abstain"}, "abstains"),
    ]
    records = [r for record, _ in broken for r in ({"response": "fine", "id": "ok"}, record)]
    done = rlx("--reward", "moody", written(folder, *records), "--json", "--deadline", "3")
    assert done.returncode == 1
    got = scored(done)
    assert [g["line"] for g in got] == list(range(1, len(records) + 1))
    assert {(g["score"], g["status"], g["id"]) for g in got[::2]} == {(0.5, "scored", "ok")}
    assert {(g["score"], g["status"]) for g in got[1::2]} == {(None, "absent")}
    for each, (_, reason) in zip(got[1::2], broken, strict=True):
        assert reason in each["reason"]
    assert f"{len(broken)} scored, {len(broken)} absent; mean score 0.5; ".encode() in done.stderr


def test_fields_flat_or_nested_and_empty_lines(folder, rlx):
    fields = {"numbers": [3, 4], "target": 7}
    path = written(
        folder,
        "\ufeff" + json.dumps({"text": RIGHT["response"], **fields}),
        "",
        {"text": RIGHT["response"], "problem": fields, "numbers": None},
        {"text": "\ud800<answer>4+3</answer>", **fields, "id": 5},
        RIGHT,
    )
    done = rlx("--reward", "countdown", path, "--json", "--response-field", "text")
    got = [(g["line"], g.get("id"), g["score"]) for g in scored(done)]
    assert got == [(1, None, 1.0), (3, None, 1.0), (4, 5, 1.0), (5, None, None)]
    assert scored(done)[3]["reason"] == "`text` is missing"


def test_samples_are_what_the_line_says(folder, rlx):
    path = written(
        folder,
        {"response": "mm</think><plan>abc</plan><answer>1</answer><answer>23</answer>", "a": 1},
        {"response": "mm</think><answer>1", "number": 2, "turn": "confidence"},
        {
            "response": "<answer>1</answer>",
            "spans": {"answer": "12345"},
            "n_tokens": 7,
            "info": {"k": []},
            "problem": {"b": 1},
        },
    )
    first, second, third = scored(rlx("--reward", "seen", path, "--json"))
    base = {"number": 1.0, "tokens": 0.0, "info": 0.0, "fields": 1.0}
    assert first["parts"] == base | {"think": 2.0, "plan": 3.0, "answer": 2.0}
    assert first["reason"] == "answer ['a']"
    assert second["parts"] == base | {"number": 2.0, "fields": 2.0}
    assert second["reason"].startswith("confidence")
    assert third["parts"] == base | {"answer": 5.0, "tokens": 7.0, "info": 1.0}
    assert third["reason"] == "answer ['b']"


def test_rewards_that_read_others(folder, rlx):
    told = {"response": "<confidence>1</confidence>", "turn": "confidence"}
    path = written(folder, told | {"of": 1}, told | {"of": 0.0}, told)
    done = rlx("--reward", "rlcr.brier", path, "--json")
    assert [g["score"] for g in scored(done)] == [1.0, 0.0, None]
    assert "`of` is missing" in scored(done)[2]["reason"]


def test_lines_of_one_group_are_judged_together(folder, rlx):
    lines = [("aaa", 1), ("a", 1), ("b", "x"), ("{", None), ("bb", "x"), ("c", 1), ("d", None)]
    records = [t if t == "{" else {"response": t, "group": g, "id": t} for t, g in lines]
    done = rlx("--reward", "rank", written(folder, *records), "--json")
    assert done.returncode == 1
    got = scored(done)
    assert [g["score"] for g in got] == [1.0, 0.0, 0.0, None, 1.0, None, None]
    assert [g["line"] for g in got] == list(range(1, 8))
    assert "must be neighbours" in got[5]["reason"]
    assert "`group` is missing" in got[6]["reason"]


def test_options_reach_the_reward(folder, rlx):
    wrong = RIGHT | {"target": 8, "data_source": "countdown"}
    path = written(folder, wrong, RIGHT | {"data_source": "countdown"})
    done = rlx("--reward", "countdown", path, "--json", "--set", "format_score=0.25")
    assert [g["score"] for g in scored(done)] == [0.25, 1.0]
    nested = [
        "--set=sources.countdown={plugin: countdown, score: 3}",
        "--set=sources.countdown.format_score=2",
    ]
    done = rlx("--reward", "by_data_source", path, "--json", *nested)
    assert [g["score"] for g in scored(done)] == [2.0, 3.0]


def test_what_is_refused(folder, rlx, subtests):
    for arguments, code, said in (
        (["lines.jsonl"], 2, "--reward"),
        (["--reward", "countdown"], 2, "FILE"),
        (["--reward=countdown", "lines.jsonl", "--workers=0"], 2, "--workers"),
        (["--reward=countdown", "lines.jsonl", "--deadline=nan"], 2, "--deadline nan"),
        (["--reward=countdown", "lines.jsonl", "--set=format_scor=1"], 2, "'format_score'"),
        (["--reward=countdown", "lines.jsonl", "--set=score=no"], 2, "must be a number"),
        (["--reward=countdown", "lines.jsonl", "--set=score"], 2, "key=value"),
        (["--reward=countdown", "lines.jsonl", "--set=plugin=x"], 2, "--reward"),
        (["--reward=by_data_source", "lines.jsonl"], 2, "sources"),
        (["--reward=countdwon", "lines.jsonl"], 3, "did you mean 'countdown'"),
        (["--reward=broken", "lines.jsonl"], 3, "No module named 'no_such_module'"),
        (["--reward=lacking", "lines.jsonl"], 4, "/nowhere/at-all"),
        (["--reward=countdown", "none.jsonl"], 4, "none.jsonl: No such file"),
        (["--reward=countdown", "."], 4, "Is a directory"),
    ):
        with subtests.test(arguments=arguments, code=code, said=said):
            written(folder, RIGHT)
            done = rlx(*arguments)
            assert (done.returncode, done.stdout) == (code, b"")
            assert said in done.stderr.decode() and "Traceback" not in done.stderr.decode()


def test_stdin_and_several_workers(folder, rlx):
    path = written(folder, *[RIGHT] * 3000)
    command = [*START, "score", "--reward=countdown", "--json", "-"]
    for done in (
        subprocess.run(command, input=path.read_bytes(), capture_output=True, check=False),
        rlx("--reward=countdown", "--json", path, "--workers=2"),
    ):
        assert done.returncode == 0 and b"scoring" not in done.stderr
        assert [(g["line"], g["score"]) for g in scored(done)] == [
            (i + 1, 1.0) for i in range(3000)
        ]


def test_a_table_for_people(folder, rlx, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    name, tokens = "\x1b[31m" + "漢" * 30, {"numbers": ["\x1b[2J" * 20]}
    path = written(folder, RIGHT | {"id": name}, RIGHT | tokens)
    done = rlx("--reward=countdown", path)
    head, first, second = done.stdout.decode().splitlines()
    assert head.split() == ["LINE", "ID", "SCORE", "REASON"]
    assert "\x1b" not in done.stdout.decode() and "漢" in first and first.split()[2] == "1"
    assert "漢" * 30 in first, "nothing is cut"
    assert "absent" in second and "ValueError" in second and "…" not in second
