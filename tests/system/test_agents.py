"""Programs of agents in processes of their own, which ask a sampler without a model."""

from collections import Counter
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from patience import wait_until
from rows import each_row
from speech import Speaking

from rlx.agents import AgentHost, ProgramStarter
from rlx.agents.programs import find_reason
from rlx.model import Vocabulary, build_vocabulary_dialogue
from rlx.plugin import Problem
from rlx.rollout import build_rollout_plan, sample_rollout_trees
from rlx.spec import AgentRolloutSpec

HERE = Path(__file__).parent
DIALOGUE = build_vocabulary_dialogue(Vocabulary.build_bytes())
POLICY = SimpleNamespace(
    dialogue=DIALOGUE, tokenizer=DIALOGUE.tokenizer, end_ids=DIALOGUE.end_ids, vocabulary=300
)


@pytest.fixture(autouse=True)
def _programs(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE / "agents"))


def sample(problems, starter=None, **options):
    settings = {"function": "programs:play", "num_generations": 1, "max_turns": 4, "deadline": 20}
    spec = AgentRolloutSpec.model_validate({**settings, **options})
    session = Speaking(DIALOGUE, [f"answer {n}" for n in range(50)], 4096)
    with nullcontext(starter) if starter else closing(ProgramStarter()) as starts:
        trees = sample_rollout_trees(
            build_rollout_plan(spec), problems, range(len(problems)), session, DIALOGUE,
            AgentHost(spec, POLICY, starts),
        )  # fmt: skip
    return trees, session


def problem(name, *what):
    return Problem(id=name, prompt=f"{name}\n", fields={"what": what})


def faults(tree):
    return {s.info["fault"] for s in tree.segments if "fault" in s.info}


def test_two_hundred_sessions_at_once_are_not_lost_doubled_or_crossed():
    """Among steady programs some come late, cut their connections, or die."""
    what = ("steady", "late", "cut", "steady", "die")
    problems = [problem(f"p{n}", *what) for n in range(20)]
    trees, _ = sample(problems, num_generations=10, programs=200, patience=0.05)
    for number, tree in enumerate(trees):
        turns = [tree.segments[at] for at in tree.policy_segments]
        places = Counter(turn.info["name"] for turn in turns)
        lost = {f"p{number}/4": 1, f"p{number}/9": 1}
        assert places == {f"p{number}/{place}": 3 for place in range(10)} | lost
        for at in tree.policy_segments:
            name = tree.segments[at].info["name"]
            texts = [tree.segments[above].text for above in tree.path(at)]
            read = "".join(texts[:-1])
            assert read.startswith(f"{name} begins")
            assert all(other == name for other in _list_names(read)), read
        assert faults(tree) == {"signal 9"}
    again, _ = sample(problems, num_generations=10, programs=200)
    assert again == trees


def _list_names(text):
    words = text.replace("\n", " ").split()
    return [word.removeprefix("answer") for word in words if word.startswith("p") and "/" in word]


@each_row(
    "what, reason",
    [
        ("crash", "exit code 1: ValueError: nothing works"),
        ("leave", "exit code 3"),
        ("die", "signal 9"),
        ("hang", "deadline of 10 s passed"),
        ("flood", "it printed more than 1 MiB"),
        ("hoard", "exit code 1: MemoryError"),
        ("silent", "it made no request that could be answered"),
        ("forge", "exit code 1: RuntimeError: status 404: there is no rollout at this address"),
        ("nag", "more than 100 of its requests could not be answered"),
        ("long", "exit code 1: RuntimeError: status 413: a request has at most 16777216 bytes"),
    ],
)
def test_a_program_that_fails_costs_one_rollout(what, reason):
    before = set(psutil.Process().children())
    deadline = 10 if what == "hang" else 600  # the others end by themselves, however late
    (tree, other), _ = sample(
        [problem("a", what), problem("b", "steady")], deadline=deadline, file_mb=1
    )
    assert faults(tree) == {reason}
    assert faults(other) == set()
    assert len(other.policy_segments) == 3
    assert not set(psutil.Process().children()) - before, "processes are left"


@each_row(
    "words, reason",
    [
        ("Traceback …:\n    raise Odd\nOdd: it is", "Odd: it is"),
        ("x.mjs:9\nTypeError: no {\n  [cause]: Error: port\n}\n\nNode", "[cause]: Error: port"),
        ("panic: no\n\ngoroutine 1 [running]:\nmain.main()", "panic: no"),
    ],
)  # fmt: skip
def test_the_reason_of_a_failure_is_what_names_the_error(words, reason):
    assert find_reason(words) == reason


COUNTING = """
import os, subprocess, sys
from programs import talk
with open(os.environ["COUNTED"], "a") as file:
    file.write("imported\\n")

def play(problem, address, key):
    left = "import os, time; os.setsid(); print(flush=True); time.sleep(1000)"
    subprocess.Popen([sys.executable, "-c", left], stdout=subprocess.PIPE).stdout.readline()
    talk(problem, address, 1)
"""


def test_one_process_starts_the_programs_of_every_step(tmp_path, monkeypatch):
    """A function is imported once, and nothing of a step is left in the next."""
    monkeypatch.setenv("PYTHONPATH", f"{HERE / 'agents'}:{tmp_path}")
    monkeypatch.setenv("COUNTED", str(tmp_path / "counted"))
    (tmp_path / "counting.py").write_text(COUNTING)
    before = set(psutil.Process().children())
    with closing(ProgramStarter()) as starter:
        for _ in range(2):
            trees, _ = sample([problem("a"), problem("b")], starter, function="counting:play")
            assert [faults(tree) for tree in trees] == [set(), set()]
            (process,) = set(psutil.Process().children()) - before
            wait_until("its programs to end", lambda one=process: not one.children())
        assert (tmp_path / "counted").read_text() == "imported\n"
        process.kill()
        process.wait()
        trees, _ = sample([problem("a")], starter, function="counting:play")
        assert faults(trees[0]) == set()
    assert set(psutil.Process().children()) == before


def test_a_command_has_the_problem_the_address_and_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("agent.py").write_text(
        "import json, os, sys\n"
        "from openai import OpenAI\n"
        "problem = json.load(sys.stdin)\n"
        "assert json.load(open(os.environ['RLX_PROBLEM'])) == problem\n"
        "assert os.listdir() == [] and os.getcwd() == os.environ['TMPDIR']\n"
        "client = OpenAI()\n"
        "messages = [{'role': 'user', 'content': problem['prompt']}]\n"
        "model = client.models.list().data[0].id\n"
        "stream = client.chat.completions.create(model=model, messages=messages, stream=True)\n"
        "text = ''.join(chunk.choices[0].delta.content or '' for chunk in stream)\n"
        "messages += [{'role': 'assistant', 'content': text}, {'role': 'user', 'content': 'b'}]\n"
        "reply = client.chat.completions.create(model='any', messages=messages)\n"
        "client.post('/info', cast_to=object, body={'turn': reply.id, 'right': 1})\n"
    )
    trees, _ = sample([problem("a")], function=None, command=["python", "agent.py"])
    (tree,) = trees
    assert faults(tree) == set()
    assert [(s.author, s.turn) for s in tree.segments] == [
        ("prompt", 0), ("policy", 1), ("environment", 0), ("policy", 2),
    ]  # fmt: skip
    assert tree.segments[-1].info == {"right": 1}
    missing, _ = sample([problem("a")], function=None, command=["no-such-program"])
    assert faults(missing[0]) == {"exit code 127: no-such-program: No such file or directory"}
    broken, _ = sample([problem("a")], function="programs:no_such_function")
    assert "no_such_function" in faults(broken[0]).pop()
