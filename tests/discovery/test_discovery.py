"""Plugins of throw-away distributions: found by metadata, imported by name, blamed by name."""

import subprocess
import sys
from pathlib import Path

import pytest
from guests import write_distribution
from rows import each_row

from rlx.discovery import (
    find_installed_plugin,
    list_installed_plugins,
    load_plugin,
    lookup,
    resolve_plugins,
)
from rlx.discovery.lookup import PluginFault
from rlx.plan import check_file
from rlx.spec.reading.diagnostics import InvalidSpec

GUEST = '''
from typing import Literal
from pydantic import BaseModel, model_validator
from rlx.plugin import (
    Demonstration, Environment, Estimator, Plugin, Problem, Reward, Use, reward
)

class Sums(Plugin):
    """Adds numbers."""
    span: tuple[int, int] = (1, 9)
    level: Literal["easy", "hard"] = "easy"

    @model_validator(mode="after")
    def _ordered(self):
        if self.span[0] > self.span[1]:
            raise ValueError(f"span runs backwards, from {self.span[0]} to {self.span[1]}")
        return self

    def problem(self, split, index, seed):
        return Problem(id=str(index), prompt="1+1", fields={})

    def demonstration(self, problem, seed):
        raise NotImplementedError

@reward
def exact(sample, *, strict: bool = True):
    """1 when right."""
    return 1.0

class Closeness(Reward):
    """How near the parent's value is."""
    reads_parent = True
    def score(self, sample):
        return sample.of

class Newer(Reward):
    api = 99
    def score(self, sample):
        return 0.0

class Stranger(BaseModel):
    pass

class Grumpy(Reward):
    @model_validator(mode="after")
    def _no(self):
        raise KeyError("gone")
    def score(self, sample):
        return 0.0

def bare(sample):
    return 0.0

class Acting(Estimator):
    implementation = "guest_credit:acting"
    reads = "token_rewards"
    needs = frozenset({"environment"})

class Typo(Estimator):
    implementation = "guest_credit:typo"
    needs = frozenset({"valeus"})

class Holder(Reward):
    nested = {"parts": "reward"}
    parts: dict[str, Use] = {}
    def score(self, sample):
        return 0.0

class Collides(Reward):
    weight: float = 1.0
    def score(self, sample):
        return self.weight

class Greedy(Reward):
    needs = frozenset({"greedy_scores"})
    def score(self, sample):
        return 0.0

class Mute(Environment):
    kinds = ("say",)
    def reset(self, problem, seed):
        return None
'''
POINTS = """
[rlx.tasks]
sums = guest_plugins:Sums
scoreless = guest_plugins:exact
[rlx.environments]
unwritten = rlx.plugin:Environment
mute = guest_plugins:Mute
[rlx.estimators]
acting = guest_plugins:Acting
typo = guest_plugins:Typo
[rlx.rewards]
exact = guest_plugins:exact
closeness = guest_plugins:Closeness
newer = guest_plugins:Newer
stranger = guest_plugins:Stranger
grumpy = guest_plugins:Grumpy
bare = guest_plugins:bare
nothing = guest_plugins:Nothing
needy = guest_needy:Reward
garbled = guest_garbled:Reward
leaves = guest_leaves:Reward
twice = guest_plugins:exact
holder = guest_plugins:Holder
greedy = guest_plugins:Greedy
collides = guest_plugins:Collides
slow = guest_slow:Reward
exits = guest_exits:Reward
"""
RIVAL = """
[rlx.rewards]
twice = guest_plugins:Closeness
"""
SPEC = """\
name: guest
model: {kind: tiny}
task: {plugin: sums}
rollout:
  schedule: two_turn
  confidence: {spans: [confidence]}
rewards:
  turn:
    accuracy: {plugin: exact, turn: answer}
    near: {plugin: closeness, turn: confidence, of: accuracy}
phases:
  - name: all
    steps: 3
"""


@pytest.fixture(autouse=True)
def guests(tmp_path, monkeypatch):
    slow = "import signal\nwhile True:\n    try:\n        signal.pause()\n"
    write_distribution(
        tmp_path,
        "rlx-guest",
        POINTS,
        version="0.1.0",
        guest_plugins=GUEST,
        guest_needy="# needs more\nimport not_there\n",
        guest_garbled="x = 1\ndef (:\n",
        guest_leaves="raise SystemExit('bye')\n",
        guest_slow=f"{slow}    except Exception:\n        pass\n",
        guest_exits="import os\nos._exit(7)\n",
    )
    write_distribution(tmp_path, "rlx-rival", RIVAL, version="2.0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield
    lookup._scan_entry_points.cache_clear()
    for module in [m for m in sys.modules if m.startswith("guest_")]:
        del sys.modules[module]


def spec_file(*changes):
    text = SPEC
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = Path("guest.yaml")
    path.write_text(text)
    return path


def refused(*changes, overrides=()):
    with pytest.raises(InvalidSpec) as caught:
        check_file(spec_file(*changes), overrides)
    return caught.value


def blamed(kind, name):
    with pytest.raises(PluginFault) as caught:
        load_plugin(kind, name)
    assert caught.value.exit_code == 3
    return str(caught.value)


def test_looking_up_imports_nothing():
    assert find_installed_plugin("reward", "exact").source == "rlx-guest 0.1.0"
    assert {"exact", "twice", "rlcr.brier"} <= {f.name for f in list_installed_plugins("reward")}
    assert "guest_plugins" not in sys.modules


def test_a_name_that_two_offer_must_be_qualified():
    text = blamed("reward", "twice")
    assert "provided by rlx-guest 0.1.0 and rlx-rival 2.0" in text
    assert "'rlx-guest:twice' or 'rlx-rival:twice'" in text
    assert load_plugin("reward", "rlx_rival:twice").__name__ == "Closeness"


@each_row(
    ("kind", "name", "says"),
    [
        ("reward", "needy", "cause: ModuleNotFoundError: No module named 'not_there'"),
        ("reward", "needy", "guest_needy.py:2  `import not_there`"),
        ("reward", "needy", "from rlx-guest 0.1.0 (entry point 'guest_needy:Reward')"),
        ("reward", "garbled", "guest_garbled.py:2"),
        ("reward", "leaves", "cause: SystemExit: bye"),
        ("reward", "exits", "importing it ends the process, with exit code 7"),
        ("reward", "nothing", "has no attribute 'Nothing'"),
        ("reward", "newer", "needs rlx plugin API 99; this is rlx"),
        ("reward", "stranger", "Stranger does not derive from rlx.plugin.Plugin"),
        ("reward", "bare", "put @reward on the function"),
        ("reward", "collides", "'weight' could never be set"),
        ("task", "scoreless", "not an rlx.plugin.Task"),
        ("environment", "mute", "is invalid: Mute has no `step`"),
        ("environment", "unwritten", "is invalid: Environment has no `reset`, `step`"),
    ],
)
def test_a_plugin_that_cannot_be_used_is_blamed_by_name(kind, name, says):
    text = blamed(kind, name)
    assert says in text
    assert f"{kind} plugin '{name}'" in text


def test_what_an_import_forks_may_end():
    """In a process of its own, which goes on alone."""
    code = (
        "import os; from rlx.importing import guard_import\n"
        "with guard_import():\n"
        "    child = os.fork()\n"
        "    if not child: os._exit(7)\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("7\n", "")


def test_an_import_that_hangs_is_broken_off():
    """In a process of its own: here, the alarm is the test runner's."""
    code = (
        "from rlx import importing; from rlx.discovery import load_plugin;"
        "importing.IMPORT_TIME_LIMIT = 0.2; load_plugin('reward', 'slow')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "reward plugin 'slow' failed to import" in done.stderr
    assert "importing it takes more than 0.2 s" in done.stderr


def test_resolves_every_plugin_and_remembers_where_it_came_from():
    read, plugins = check_file(spec_file(), ["loss.clip=[0.1, 0.1]"])
    assert read.spec.loss.clip == (0.1, 0.1)
    assert plugins.task.level == "easy"
    assert list(plugins.rewards) == [("turn", "accuracy"), ("turn", "near")]
    assert type(plugins.estimator).__name__ == "Grpo"
    first = plugins.provenance[0]
    assert (first.kind, first.name, first.distribution) == ("task", "sums", "rlx-guest")
    assert first.entry_point == "guest_plugins:Sums"
    before = first.sha256
    Path("guest_plugins.py").write_text(GUEST + "\n# changed\n")
    assert resolve_plugins(read.spec).provenance[0].sha256 != before
    assert plugins.warnings == ()


def test_a_plugins_own_validator_is_quoted_at_its_key():
    error = refused(("{plugin: sums}", "{plugin: sums, span: [9, 1]}"))
    assert "'task': span runs backwards, from 9 to 1" in str(error)
    assert error.diagnostics[0].path == ("task", "span")
    assert "failed on its options: KeyError: 'gone'" in str(refused(("exact", "grumpy")))


def test_needs_are_looked_at_inside_other_plugins_and_in_every_phase():
    inner = "{plugin: holder, turn: answer, parts: {a: {plugin: greedy}}}"
    error = refused(("{plugin: exact, turn: answer}", inner))
    assert error.diagnostics[0].path == ("rewards", "turn", "accuracy", "parts", "a", "plugin")
    error = refused(("steps: 3", "steps: 3\n    set: {estimator.name: acting}"))
    assert str(error.diagnostics[0].position) == "guest.yaml:14:27"
    assert "(phase 'all')" in str(error)


def test_a_stream_that_does_not_exist_is_the_plugins_fault():
    error = refused(("phases:", "estimator: {name: typo}\nphases:"))
    assert error.exit_code == 3
    assert "estimator plugin 'typo' needs 'valeus', which is not an rlx stream" in str(error)
    assert "did you mean 'values'?" in str(error)
    assert "from rlx-guest 0.1.0" in str(error)
