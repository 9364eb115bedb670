"""Runs on a machine with a GPU, and figures of them.

    python tests/gpu/runs.py cuda|cpu stages|kill NAME [KEY=VALUE...]

stages: the peak of each stage beside the plan's. kill: a run whose rank is killed, beside one that
nothing happened to: every number must be the same.

NAME is a profile for GPUs: three steps with random weights and a reward by chance; or `quick` or an
experiment on a pretrained model, which run as they are. On a CPU, sizes are those of a rehearsal.
"""

import importlib.util
import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from figures import print_figure
from random_model import write_qwen

import rlx
from rlx.api import Experiment, Run
from rlx.errors import RlxError
from rlx.launch import find_run_differences, list_live_ranks, open_registry

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
PRETRAINED = ("smollm2_grpo", "smollm2_rlcr")
QUIET = {"tracking.mlflow": "null"}
CHANCE = {"rewards.turn.chance": f"{{plugin: {Path(__file__).parent}/chance.py:chance, turn: '*'}}"}
PRETRAINED_REHEARSAL = {
    "phases": "[{name: all, steps: 2}]",
    "evaluation.problems": "2",
    "rollout.prompts_per_step": "2",
    "rollout.num_generations_answer": "3",
    **CHANCE,  # so few answers are all wrong
}
SHORT = {
    "phases.0.steps": "3",
    "evaluation.problems": "500",  # that after training is the largest batch of all
    "evaluation.every": "0",
    "runner.checkpoint.every": "3",
    "runner.checkpoint.keep": "1",
}
KILLED = {
    "phases.0.steps": "8",
    "evaluation.problems": "8",
    "runner.checkpoint.every": "1",
    "rollout.prompts_per_step": "4",
}
"""So that both runs end in some minutes."""
REHEARSAL = {
    "runner.micro_batch_tokens": "2048",
    "runner.reward_workers": "1",
    "evaluation.problems": "2",
    "rollout.prompts_per_step": "2",
}
BY_SCHEDULE = {
    "single": {"num_generations_answer": 4, "answer.max_new_tokens": 12},
    "two_turn": {
        "num_generations_answer": 4,
        "num_generations_confidence": 2,
        "answer.max_new_tokens": 12,
        "confidence.max_new_tokens": 8,
    },
    "environment": {"num_generations": 4, "max_turns": 2, "turn.max_new_tokens": 12},
}
"""Sizes of a rehearsal on a CPU, below `rollout`."""
WANTED = ("perf/", "sampler/", "train/", "rewards/")
"""Figures of a step that are printed."""


def find_lack(device: str, name: str, overrides: list[str]) -> str | None:
    """What is not here and the runs need."""
    if name in PRETRAINED and not any((EXPERIMENTS / "smollm2").glob("*.gguf")):
        return "the model is not here: python experiments/smollm2/fetch.py"
    if any("vllm" in override for override in overrides) and not importlib.util.find_spec("vllm"):
        return "vLLM is not installed here"
    if "runner.ranks=2" in overrides and device == "cuda" and torch.cuda.device_count() < 2:
        return "there is one GPU"
    return None


def open_experiment(
    device: str, what: str, name: str, home: Path, overrides: list[str]
) -> Experiment:
    """Reads an experiment; `home`, a new folder, becomes RLX_HOME of this process."""
    is_small, file = device == "cpu", EXPERIMENTS / f"{name}.yaml"
    os.environ["RLX_HOME"] = str(home)
    values = {**QUIET, "runner.device": device}
    if name in PRETRAINED:
        values |= PRETRAINED_REHEARSAL if is_small else {"runner.dtype": "bfloat16"}
        values |= {"runner.checkpoint.every": "1"} if what == "kill" else {}
    elif name != "quick":
        write_qwen(home / "qwen", "small" if is_small else "1.5b", device)
        values |= {**SHORT, **CHANCE, "model.path": str(home / "qwen")}
        if is_small:
            sizes = BY_SCHEDULE[rlx.read(file).spec.rollout.schedule]
            values |= REHEARSAL | {f"rollout.{key}": str(value) for key, value in sizes.items()}
        elif what == "kill":
            values["rollout.answer.max_new_tokens"] = "128"
        values |= KILLED if what == "kill" else {}
    return rlx.read(file, *(f"{key}={value}" for key, value in values.items()), *overrides)


def follow_run(run: Run) -> None:
    """Waits for the end of a run, and prints figures of its steps as they come."""
    shown, ended = 0, False
    while not ended:
        with suppress(TimeoutError, RlxError):
            run.wait(timeout=2.0)
        ended, frame = run.record.ended, run.metrics()
        steps = frame.index if ended else frame.index[:-1]  # the last may lack figures still
        for step in steps[shown:]:
            values = frame.loc[step].dropna().to_dict()
            figures = {name: value for name, value in values.items() if name.startswith(WANTED)}
            print_figure(f"step {step}", **figures)
        shown = len(steps)
    run.wait()  # raises where it failed
    for _, row in run.evaluations().iterrows():
        told = row.dropna().to_dict()
        name = f"evaluation {told.pop('label')}, {told.pop('suite')}, step {told.pop('step')}"
        print_figure(
            name, **{k: value for k, value in told.items() if isinstance(value, int | float)}
        )


def compare_stages(experiment: Experiment) -> None:
    """Plans, runs and compares."""
    memory = rlx.plan_experiment(experiment).report.phases[0].memory
    planned = {stage: size / 2**30 for stage, size in memory.stage_totals.items()}
    print_figure("planned_gib", **planned)
    run = rlx.submit(experiment)
    follow_run(run)
    last = run.metrics().ffill().iloc[-1].to_dict()
    assert "train/grad_norm" in last, "no step learned anything"
    for stage in planned:
        if (peak := last.get(f"perf/memory_{stage}_gib")) is not None:
            print_figure(
                f"peak of {stage}", gib=peak, planned=planned[stage], ratio=peak / planned[stage]
            )


def compare_killed(experiment: Experiment) -> None:
    """Runs twice, kills the ranks of the second once half of the steps are recorded."""
    whole = rlx.submit(experiment)
    follow_run(whole)
    killed = rlx.submit(experiment, again=True)
    while killed.record.step < max(1, whole.record.step // 2):
        assert not killed.record.ended, f"{killed.id} ended: {killed.record.reason}"
        time.sleep(0.05)
    ranks = list(list_live_ranks(Path(killed.record.directory)))
    assert ranks, "no rank was found"
    for pid in ranks:
        psutil.Process(pid).send_signal(signal.SIGKILL)
    print_figure("killed", step=killed.record.step, steps=whole.record.step)
    killed.wait()
    with open_registry(whole.registry) as registry:
        found = list(find_run_differences(registry, whole.id, killed.id))
        attempts = registry.history(killed.id)[-1].attempt
    metrics = whole.metrics().shape[1]
    print_figure("compared", attempts=attempts, metrics=metrics, differences=found[:10])
    assert attempts > 1, "the run was not started again"
    assert not found, f"{len(found)} differences"


def main(device: str, what: str, name: str, *overrides: str) -> int:
    """Returns 77 where something is not here that the runs need."""
    if lack := find_lack(device, name, list(overrides)):
        print(lack)
        return 77
    with tempfile.TemporaryDirectory() as home:
        experiment = open_experiment(device, what, name, Path(home), list(overrides))
        {"stages": compare_stages, "kill": compare_killed}[what](experiment)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
