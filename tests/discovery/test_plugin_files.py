"""Plugins in a Python file beside an experiment."""

import pickle
import shutil

import pytest
from homes import SMALL, Home

from rlx.cli import main
from rlx.discovery import load_plugin
from rlx.discovery.lookup import PluginFault
from rlx.errors import SpecError
from rlx.plugin import Sample, Score
from rlx.plugin_files import keep_plugin_file
from rlx.reward.plugin_process import describe_error

SOURCE = '''
from rlx.plugin import Reward, reward

@reward
def decorated(sample, *, limit: int = 3):
    """Short."""
    return float(len(sample.response) <= limit)

def plain(sample, *, limit: int = 3):
    """Short."""
    return float(len(sample.response) <= limit)

class Whole(Reward):
    """Short."""
    limit: int = 3
    def score(self, sample):
        return float(len(sample.response) <= self.limit)

def as_trl(completions, target, **columns):
    return [None if c == "?" else float(c == str(t)) for c, t in zip(completions, target)]

def as_trl_of_messages(completions, target):
    return [float(c[0]["content"] == str(t)) for c, t in zip(completions, target)]

def as_trl_of_prompts(prompts, completions, **columns):
    assert set(columns) == {"prompt", "target"}
    return [float(p == c) for p, c in zip(prompts, completions)]

def as_verl(data_source, solution_str, ground_truth, extra_info=None):
    assert extra_info.get("index", 0) == 0
    return {"score": float(solution_str == ground_truth), "length": len(solution_str)}

async def late(completions):
    return [0.0 for _ in completions]

def asking(completions, colour):
    return [0.0 for _ in completions]

def odd(sample, limit):
    return 0.0

number = 3
'''


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("RLX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SOURCE)
    return tmp_path


def sample(response, number=1, **problem):
    return Sample(id=str(number), problem=problem, turn="answer", number=number, response=response)


def load(name, **options):
    """The plugin, as a process of scorers has it: sent through pickle."""
    cls = load_plugin("reward", keep_plugin_file(f"mine.py:{name}"))
    return pickle.loads(pickle.dumps(cls.model_validate(options)))


def test_functions_are_called_by_the_signature_that_they_have(folder):
    for name in ("decorated", "plain", "Whole"):
        made = load(name, limit=5)
        assert (made.scope, made.limit, type(made).__doc__) == ("sample", 5, "Short."), name
        assert [made.score(sample("x" * n)) for n in (5, 6)] == [1.0, 0.0], name

    trl = load("as_trl")
    group = [sample(text, target=7, other=[1]) for text in ("7", "8", "?")]
    assert (trl.scope, trl.score(group)) == ("group", [1.0, 0.0, None])
    assert load("as_trl_of_messages", messages=True).score(group[:2]) == [1.0, 0.0]

    asked = [sample(text, prompt="say 7", target=7) for text in ("7", "say 7")]
    assert load("as_trl_of_prompts").score(asked) == [0.0, 1.0]

    verl = load("as_verl")
    nested = {"data_source": "sums", "reward_model": {"ground_truth": "7"}}
    for problem in (nested, {"ground_truth": "7"}):
        scored = [verl.score(sample(text, **problem)) for text in ("7", "12")]
        assert scored == [Score(1.0, parts={"length": 1}), Score(0.0, parts={"length": 2})]


def test_the_line_that_failed_is_named(folder):
    line = SOURCE.splitlines().index('    assert extra_info.get("index", 0) == 0') + 1
    with pytest.raises(AssertionError) as raised:
        load("as_verl").score(sample("7", ground_truth="7", extra_info={"index": 1}))
    assert describe_error(raised.value) == f"line {line} of its file: AssertionError: "


def test_problems_that_a_function_cannot_use_are_refused(folder):
    with pytest.raises(ValueError, match="as_trl asks for the column 'target'"):
        load("as_trl").check_problem({"answer": "7"})
    load("as_trl").check_problem({"target": 7})
    with pytest.raises(ValueError, match="the column 'prompts', TRL's name of the column 'prompt'"):
        load("as_trl_of_prompts").check_problem({"question": "say 7"})
    for problem in ({"prompt": "say 7"}, {"prompts": "say 7"}):
        load("as_trl_of_prompts").check_problem(problem)
    with pytest.raises(ValueError, match="compares with `ground_truth`"):
        load("as_verl").check_problem({"target": 7})


def test_the_text_is_kept_and_an_edited_file_is_another_plugin(folder):
    first = keep_plugin_file("./mine.py:plain")
    assert keep_plugin_file(f"{folder}/mine.py:plain") == first
    (folder / "mine.py").write_text(SOURCE.replace("<= limit", "< limit"))
    second = keep_plugin_file("mine.py:plain")
    assert first != second
    (folder / "mine.py").unlink()
    scores = [
        load_plugin("reward", kept).model_validate({}).score(sample("abc"))
        for kept in (first, second)
    ]
    assert scores == [1.0, 0.0]
    assert keep_plugin_file(first) == first
    for copy in (folder / "cache").rglob("of_*.py"):
        copy.write_text("def plain(sample):\n    return 9.0\n")
    with pytest.raises(PluginFault, match="gone or was changed"):
        load_plugin("reward", first)
    assert not (folder / "home").exists(), "nothing has been submitted"


def test_what_cannot_be_used_is_named(folder):
    with pytest.raises(SpecError, match=r"the plugin's file .*nope\.py cannot be read: No such"):
        keep_plugin_file("nope.py:plain")
    for name, said in {
        "late": "late is asynchronous",
        "odd": "option 'limit' must be keyword-only and typed",
        "missing": "mine.py defines no missing; it defines decorated, plain",
        "number": "names a int, not a class",
    }.items():
        with pytest.raises(PluginFault) as refused:
            load(name)
        assert said in str(refused.value), name
        assert "from the file mine.py, kept as" in str(refused.value), name


def test_a_run_uses_what_it_began_with_and_is_rescored_to_the_bit(tmp_path):
    home = Home(tmp_path)
    (home.folder / "mine.py").write_text(SOURCE)
    rewards = {
        f"rewards.turn.{name}.{key}": value
        for name in ("plain", "Whole", "as_trl")
        for key, value in {"plugin": f"mine.py:{name}", "turn": "answer"}.items()
    }
    (home.folder / "late.py").write_text(SOURCE.replace("<= limit", "> limit"))
    late = {"phases.1.set.rewards.turn.plain.plugin": "late.py:decorated"}
    sets = {**SMALL, **rewards, "rewards.turn.plain.limit": 12, **late}
    run = home.submit(home.yaml, sets)
    scored = [
        {entry["name"]: entry["raw"] for entry in segment["rewards"]}
        for _, trees, _ in home.bodies(run)
        for tree in trees
        for segment in tree["segments"]
        if segment["kind"] == "answer"
    ]
    assert len({tuple(sorted(one)) for one in scored}) == 1
    assert {"plain", "Whole", "as_trl"} <= scored[0].keys()

    again = home.rlx("submit", home.yaml, "--quiet", sets=sets)
    assert again.stdout.strip() == run.id, "nothing has changed"
    (home.folder / "mine.py").write_text(SOURCE.replace("<= limit", "> limit"))
    shutil.rmtree(tmp_path / "cache")
    assert home.json("rescore", run.id)["same"], "the run's own text is kept"
    assert home.submit(home.yaml, sets).digest != run.digest
    edited = "rewards.turn.plain={plugin: mine.py:plain, turn: answer, limit: 12}"
    told = home.json("rescore", run.id, "--set", edited)
    assert not told["same"]


def test_a_file_that_is_missing_is_named_with_its_line(folder, capsys):
    (folder / "x.yaml").write_text("extends: rlcr\nrewards:\n  turn:\n    a: {plugin: no.py:f}\n")
    assert main(["validate", "x.yaml"]) == 2
    said = capsys.readouterr().err
    assert "the plugin's file no.py cannot be read" in said
    assert "--> x.yaml:4:" in said
    (folder / "y.yaml").write_text("extends: x.yaml\nrewards: {turn: {a: null}}\n")
    assert main(["validate", "y.yaml"]) == 0, "what is replaced need not be there"
    capsys.readouterr()
    assert main(["validate", "y.yaml", "--set=rewards.turn.b.plugin=rewards.py"]) == 2
    assert "a plugin in a file is named FILE.py:NAME" in capsys.readouterr().err


def test_commands_take_a_file_as_a_name(folder, capsys):
    (folder / "lines.jsonl").write_text('{"response": "ab"}\n{"response": "abcd"}\n')
    assert main(["score", "--reward", "mine.py:plain", "lines.jsonl", "--json"]) == 0
    assert [line.count('"score": 1.0') for line in capsys.readouterr().out.splitlines()] == [1, 0]
    assert main(["score", "--reward", "mine.py:as_verl", "lines.jsonl", "--json"]) == 1
    assert capsys.readouterr().out.count("compares with `ground_truth`") == 2
    assert main(["plugins", "show", "mine.py:plain"]) == 0
    assert "limit" in capsys.readouterr().out
    assert main(["plugins", "check", "mine.py:Whole"]) in (0, 3)
    assert "returns a number or abstains" in capsys.readouterr().out
