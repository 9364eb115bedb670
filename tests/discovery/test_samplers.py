"""A sampling engine of another distribution, named in YAML with its own settings."""

import json
from importlib.metadata import distribution
from pathlib import Path

import pytest
import torch
from guests import installed
from rows import each_row

from rlx.cli import main
from rlx.discovery import resolve_plugins
from rlx.errors import EnvironmentFault
from rlx.model import build_policy
from rlx.plan import check_file
from rlx.rollout import CompletionRequest
from rlx.sampler import open_sampler, require_engine
from rlx.spec import (
    LAUNCHERS,
    SAMPLERS,
    SCHEDULES,
    TRACKERS,
    ExperimentSpec,
    RunnerSpec,
    TinyModelSpec,
    TurnSpec,
)
from rlx.spec.reading.diagnostics import InvalidSpec

QUICK = Path(__file__).parents[2] / "experiments" / "quick.yaml"
SETTINGS = '''
from typing import ClassVar, Literal
from pydantic import BaseModel, ConfigDict, Field
from rlx.plugin import SamplerPlugin

class Window(BaseModel):
    """A range of tokens."""
    model_config = ConfigDict(extra="forbid", frozen=True)
    start: int = Field(0, ge=0)
    """First token."""

class Echo(SamplerPlugin):
    """Repeats one token."""
    implementation: ClassVar[str] = "page_echo_engine:open_echo"
    engine: Literal["echo"] = "echo"
    token: int = Field(7, ge=0, le=1000)
    """The token that it repeats."""
    window: Window = Window()
    stops: tuple[str, ...] = ()

    def check(self):
        if self.token == 13:
            raise OSError("no token 13 here")
'''
ENGINE = """
from contextlib import contextmanager
from rlx.rollout import Completion
from rlx.sampler import SamplingEngine

class Session:
    context_length = 64
    def __init__(self, token):
        self.token = token
    def generate(self, requests, sampling):
        one = Completion((self.token,) * 2, (0.0, 0.0), "stop")
        return [tuple(one for _ in request.seeds) for request in requests]

class Engine(SamplingEngine):
    description = "an echo"
    def __init__(self, settings):
        self.settings = settings
    @contextmanager
    def session(self):
        yield Session(self.settings.token)
    def load(self, weights):
        pass

@contextmanager
def open_echo(policy, settings, runner, device):
    yield Engine(settings)
"""
POINTS = """[rlx.samplers]
echo = page_echo:Echo
broken = page_no_such_module:Echo
misnamed = page_echo:Echo
alien = page_echo:Window
"""


@pytest.fixture(autouse=True)
def guest(tmp_path, monkeypatch):
    modules = {"page_echo": SETTINGS, "page_echo_engine": ENGINE}
    with installed(tmp_path, monkeypatch, "rlx-echo", POINTS, **modules):
        yield


def read(sampler):
    return check_file(QUICK, [f"sampler={sampler}"])[0].spec


def test_yaml_names_it_and_a_stored_spec_reads_back():
    spec = read("{engine: echo, token: 9, window: {start: 2}, stops: [a]}")
    stored = spec.dump_resolved()
    given = {"engine": "echo", "token": 9, "window": {"start": 2}, "stops": ["a"]}
    assert stored["sampler"] == {**given, "max_rows": 512}
    again = ExperimentSpec.model_validate_json(json.dumps(stored), strict=True)
    assert again == spec and again.digest == spec.digest
    assert spec.digest != read("{engine: echo, token: 8}").digest


def test_a_run_records_where_it_comes_from_and_rlxs_own_come_with_rlx():
    origins = resolve_plugins(read("{engine: echo}")).provenance
    assert [(one.distribution, one.name) for one in origins if one.kind == "sampler"] == [
        ("rlx-echo", "echo")
    ]
    assert not [one for one in resolve_plugins(read("{}")).provenance if one.kind == "sampler"]


@each_row(
    ("value", "says", "code"),
    [
        ("{engine: ehco}", "must be 'transformers' or 'vllm' or .*did you mean 'echo'", 2),
        ("{engine: 3}", "'sampler.engine' must be 'transformers'", 2),
        ("echo", "'sampler' must be a mapping", 2),
        ("{engine: echo, tokne: 1}", "unknown key 'sampler.tokne'.*did you mean 'token'", 2),
        ("{engine: echo, token: -1}", "'sampler.token' must be at least 0, not -1", 2),
        ("{engine: echo, window: {start: x}}", "'sampler.window.start' must be a whole number", 2),
        ("{engine: echo, kv_cache_mb: 9}", "'kv_cache_mb' belongs to 'vllm'", 2),
        ("{engine: broken}", "sampler plugin 'broken' failed to import: ModuleNotFound", 3),
        ("{engine: misnamed}", r"does not set `engine: Literal\['misnamed'\]", 3),
        ("{engine: alien}", "does not derive from rlx.plugin.SamplerPlugin", 3),
    ],
)
def test_what_is_wrong_is_named_with_its_path(value, says, code):
    with pytest.raises(InvalidSpec, match=r"(?s)" + says) as caught:
        read(value)
    assert caught.value.exit_code == code
    assert len(caught.value.diagnostics) == 1
    assert caught.value.diagnostics[0].position is not None


def test_a_run_opens_the_engine_that_it_names():
    settings = read("{engine: echo, token: 9}").sampler
    require_engine(settings)
    policy = build_policy(TinyModelSpec(hidden_size=32, heads=1, kv_heads=1, layers=1), 0)
    with (
        open_sampler(policy, settings, RunnerSpec(), torch.device("cpu")) as engine,
        engine.session() as session,
    ):
        [[first, second]] = session.generate([CompletionRequest((1,), None, (1, 2))], TurnSpec())
    assert first.token_ids == second.token_ids == (9, 9)
    with pytest.raises(EnvironmentFault, match="'echo' cannot run here: no token 13"):
        require_engine(read("{engine: echo, token: 13}").sampler)


def test_it_is_listed_checked_validated_and_planned(capsys):
    assert main(["plugins"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in ("echo", "vllm", "misnamed"))
    assert main(["plugins", "show", "echo"]) == 0
    assert "token" in capsys.readouterr().out
    assert main(["plugins", "check", "echo"]) == 0
    assert "promises hold" in capsys.readouterr().out
    assert main(["validate", str(QUICK), "--set=sampler={engine: echo}"]) == 0
    assert main(["plan", str(QUICK), "--full", "--set=sampler={engine: echo, max_rows: 2}"]) == 0
    assert "the sampler's cache" in capsys.readouterr().out


@each_row("section", [LAUNCHERS, SAMPLERS, SCHEDULES, TRACKERS])
def test_rlxs_own_are_entry_points(section):
    points = distribution("rlx").entry_points.select(group=section.group)
    assert {point.name: point.load() for point in points} == section.shipped
