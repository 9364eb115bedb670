"""Tasksets of verifiers through rlx. Those that need verifiers itself run with its interpreter:

RLX_VERIFIERS_PYTHON=/path/to/venv/bin/python pytest tests/system/test_verifiers.py
"""

import os
import sys

import pytest
from patience import LIMIT

from rlx.plugin import Action
from rlx.reward import PooledHost, RewardPool
from rlx.rollout import LocalHost
from rlx.testing import check_task
from rlx.testing.rewards import HOSTILE_TEXTS
from rlx_gyms.verifiers import (
    RemoteFault,
    TasksetProcess,
    TasksetSource,
    VerifiersEnvironment,
    VerifiersTask,
)

PYTHON = os.environ.get("RLX_VERIFIERS_PYTHON")

needs_verifiers = pytest.mark.skipif(PYTHON is None, reason="RLX_VERIFIERS_PYTHON is not set")

SUMS = """
import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumConfig(vf.TasksetConfig):
    largest: int = 9


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.5)
    async def right(self, task: SumData, trace: vf.Trace) -> float:
        print("must not stand among the answers")
        if trace.last_reply == "hang":
            while True:
                pass
        if trace.last_reply == "exit":
            raise SystemExit(3)
        return float(trace.last_reply == task.answer)

    @vf.metric
    async def length(self, task: SumData, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for a in range(self.config.largest + 1):
            for b in range(self.config.largest + 1):
                yield SumTask(SumData(prompt=f"{a}+{b}=", answer=str(a + b)), self.config.task)


__all__ = ["SumTaskset"]
"""


# The process --------------------------------------------------------------------------------------

SERVES = """
import os, sys, time
print('{"count": 1}', flush=True)
for line in sys.stdin:
    exec(ACTION)
"""


@pytest.mark.parametrize(
    ("action", "says"),
    [
        ("time.sleep(60)", "does not answer `score` within 0.5 s"),
        ("while True: os.write(1, b' '); time.sleep(0.05)", "does not answer `score` within 0.5 s"),
        ("print('x' * 2_000_000, flush=True)", "more than one megabyte"),
        ("print('<html>', flush=True)", "invalid JSON"),
        ("print('[]', flush=True)", "sent list"),
        ("print('{\"reward\": NaN}', flush=True)", "NaN"),
        ("print('reason', file=sys.stderr); os._exit(7)", "ended its process in `score`: reason"),
        ('print(\'{"error": "TaskError", "message": "bad"}\', flush=True)', "TaskError: bad"),
    ],
)
def test_a_process_that_misbehaves_is_named_and_started_again(tmp_path, action, says):
    program = tmp_path / "program.py"
    program.write_text(SERVES.replace("ACTION", repr(action)))
    process = TasksetProcess(TasksetSource(sys.executable, "sums", "{}"), program)
    try:
        for _ in range(2):
            with pytest.raises(RemoteFault, match=says):
                process.request("score", 0.5 if "within" in says else LIMIT, index=0, text="1")
    finally:
        process.close()


@pytest.mark.parametrize(
    ("python", "says"),
    [
        (sys.executable, f"{sys.executable} has no verifiers: .* -m pip install"),
        ("/no/such/python", "/no/such/python cannot be run: No such file"),
    ],
)
def test_an_interpreter_without_verifiers_is_named_before_a_run(python, says):
    with pytest.raises(ValueError, match=says):
        VerifiersTask(taskset="sums", python=python).check()


# A taskset ----------------------------------------------------------------------------------------


@pytest.fixture
def task(tmp_path):
    """A taskset in a local folder."""
    folder = tmp_path / "sums"
    folder.mkdir()
    (folder / "__init__.py").write_text(SUMS)
    return VerifiersTask(taskset=str(folder), python=PYTHON, config={"largest": 5}, held_out=3)


@needs_verifiers
def test_answers_are_scored_by_the_rewards_of_the_taskset(task):
    task.check()
    host = LocalHost(VerifiersEnvironment())
    for index in range(3):
        problem = task.problem("test", index, 0)
        first, second = problem.prompt.rstrip("=").split("+")
        (state,) = host.reset([(problem.fields, 0)])
        answers = (str(int(first) + int(second)), "100")
        right, wrong = host.step([(state, Action(text=text)) for text in answers])
        assert right.done
        assert right.info["return"] == right.info["right"] == 0.5
        assert wrong.info["return"] == 0.0
        assert wrong.info["length"] == 3.0


@needs_verifiers
def test_a_score_that_hangs_or_ends_its_process_costs_itself_alone(task, monkeypatch):
    monkeypatch.setattr("rlx_gyms.verifiers._SCORE_SECONDS", 2.0)
    problem = task.problem("train", 0, 0)
    host = LocalHost(VerifiersEnvironment())
    (state,) = host.reset([(problem.fields, 0)])
    for text, says in (("hang", "within 2 s"), ("exit", "ended its process")):
        with pytest.raises(RemoteFault, match=says):
            host.step([(state, Action(text=text))])
    for text in HOSTILE_TEXTS.values():
        (step,) = host.step([(state, Action(text=text))])
        assert step.info["return"] == 0.0


@needs_verifiers
def test_options_that_the_taskset_does_not_have_are_named(task):
    with pytest.raises(ValueError, match="largst"):
        task.model_copy(update={"config": {"largst": 5}}).check()


@needs_verifiers
def test_the_task_keeps_its_promises_and_workers_score_alike(task):
    check_task(task)
    problem = task.problem("train", 0, 0)
    environment = VerifiersEnvironment()
    (state,) = LocalHost(environment).reset([(problem.fields, 0)])
    calls = [(state, Action(text=text)) for text in ("1", "2", "3", "hello")]
    with RewardPool(1, 2048) as pool:
        steps = PooledHost(environment, pool, 90.0).step(calls)
    assert [s.info for s in steps] == [s.info for s in LocalHost(environment).step(calls)]
