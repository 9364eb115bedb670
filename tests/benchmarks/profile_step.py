"""Where the time of a training step goes: results/profile.md and its picture.

    python tests/benchmarks/profile_step.py             # profiles, and writes the page
    python tests/benchmarks/profile_step.py NAME FILE   # one experiment, as JSON

Each experiment runs in a process of its own, with its warm start (from the cache below RLX_HOME,
where it has been made before) and the phase that is meant alone. The first step warms up. Stages
are timed over the next three without a profiler, whose cost falls on many small operations; torch's
profiler then looks at one more, for the operations.
"""

import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).with_name("results")
PAGE, PICTURE = RESULTS / "profile.md", RESULTS / "profile.png"
TIMED = range(2, 5)
PROFILED = 5
OPERATIONS = 12

EXPERIMENTS = {
    "rlcr": ("rlcr.yaml, joint phase", "phases=[{name: joint, steps: 5}]"),
    "kg": ("kg.yaml", "phases=[{name: grpo, steps: 5}]"),
}
STAGES = {
    "generation": ["rlx.run.collect:sample_rollout_trees"],
    "scoring": ["rlx.run.collect:score_rollouts"],
    "credit": ["rlx.run.collect:build_token_batch", "rlx.step:assign_credit"],
    "forward": ["rlx.learner.engine:TrainingEngine.__call__"],
    "backward": ["deepspeed.runtime.engine:DeepSpeedEngine.backward"],
    "optimiser": ["deepspeed.runtime.engine:DeepSpeedEngine.step"],
    "weights to the sampler": ["rlx.run.training:synchronize_sampler"],
    "recording": ["rlx.run.training:_record_training_step"],
}
"""What each stage calls; no stage calls another's."""
REST = "packing and the rest"
COLOURS = (
    *("#0072B2", "#56B4E9", "#009E73", "#F0E442", "#E69F00", "#D55E00", "#CC79A7"),
    *("#262626", "#BBBBBB"),
)
"""Okabe and Ito's, and grey."""


class Clock:
    """Seconds of each stage of the step in hand."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, stage: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, whose time is kept and which a profiler sees by its stage."""
        from torch.profiler import record_function

        def outer(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                with record_function(stage):
                    return inner(*arguments, **named)
            finally:
                spent = time.perf_counter() - began
                self.seconds[stage] = self.seconds.get(stage, 0.0) + spent

        return outer

    def watch(self) -> None:
        """Times every stage from now on."""
        for stage, places in STAGES.items():
            for place in places:
                module, _, path = place.partition(":")
                owner = __import__(module, fromlist=["_"])
                *above, name = path.split(".")
                for part in above:
                    owner = getattr(owner, part)
                setattr(owner, name, self.timed(stage, getattr(owner, name)))


def profile(name: str, target: Path) -> None:
    """Runs one experiment in this process and writes what its steps were made of."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    from rlx.run import loop

    clock, plain = Clock(), loop.train_step
    steps: list[dict[str, float]] = []
    found: dict[str, Any] = {}

    def train_step(m: Any, parts: Any, phase: str, step: int, *rest: Any, **named: Any) -> Any:
        if step == 1:
            clock.watch()
        clock.seconds.clear()
        began = time.perf_counter()
        if step == PROFILED:
            with torch_profile(activities=[ProfilerActivity.CPU]) as seen:
                done = plain(m, parts, phase, step, *rest, **named)
            found["operations"] = _operations(seen)
            return done
        done = plain(m, parts, phase, step, *rest, **named)
        whole = time.perf_counter() - began
        left = whole - sum(clock.seconds.values())
        if step in TIMED:
            steps.append({**clock.seconds, REST: left, "step": whole})
        return done

    loop.train_step = train_step
    with run_of(name) as run:
        run()
    found["stages"] = {n: statistics.median(s[n] for s in steps) for n in (*STAGES, REST, "step")}
    target.write_text(json.dumps(found))


def _operations(seen: Any) -> list[dict[str, Any]]:
    """The operations that a step spends most time in, that of what they call left out."""
    rows = [e for e in seen.key_averages() if e.key not in STAGES]
    whole = sum(e.self_cpu_time_total for e in rows)
    rows.sort(key=lambda e: -e.self_cpu_time_total)
    return [
        {"name": e.key, "share": e.self_cpu_time_total / whole, "calls": e.count}
        for e in rows[:OPERATIONS]
    ]


@contextmanager
def run_of(name: str) -> Iterator[Callable[[], None]]:
    """The experiment as a run of one rank, with a registry that is thrown away."""
    _, phase = EXPERIMENTS[name]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ.update(alone, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RLX_RUN_ATTEMPT="1")

    from rlx.home import RunFolder
    from rlx.learner import join_ranks
    from rlx.plan import check_file
    from rlx.record.recorder import Recorder
    from rlx.run.context import StopRequest
    from rlx.run.loop import run_experiment
    from rlx_registry import Registry

    overrides = [phase, "evaluation.problems=1", "evaluation.variants={}", "runner.device=cpu"]
    spec = check_file(ROOT / "experiments" / f"{name}.yaml", overrides)[0].spec
    with tempfile.TemporaryDirectory() as place:
        folder = RunFolder(Path(place) / "run")
        folder.root.mkdir()
        with Registry.open(f"sqlite:///{place}/registry.db") as registry:
            run_id = registered(registry, spec, folder)
            recorder = Recorder(registry, run_id, keep_bodies=True)
            ranks, stop = join_ranks(spec.runner), StopRequest()
            yield lambda: run_experiment(spec, folder, ranks, recorder, stop)


def registered(registry: Any, spec: Any, folder: Any) -> str:
    """A run that records may be written for."""
    run, _ = registry.submit(
        digest=spec.digest,
        seed=spec.seed,
        name=spec.name,
        spec=spec.dump_resolved(),
        yaml="",
        plugins=[],
        code={},
        environment={},
    )
    registry.update_run(run.id, directory=folder.root, steps_total=spec.steps)
    registry.transition(run.id, ["submitted"], "running")
    return str(run.id)


# The page -----------------------------------------------------------------------------------------


def page(found: dict[str, Any]) -> str:
    """All of results/profile.md."""
    said = [
        "# Where the time of a step goes",
        "",
        "Written by `python tests/benchmarks/profile_step.py`: the tiny models of two experiments,",
        f"one rank, one thread, on {platform.machine()} without a GPU. Wall time, medians of three",
        "steps; other work may have shared the machine, so read shares rather than seconds.",
        "",
        "![Shares of a step](profile.png)",
        "",
        "| stage | " + " | ".join(title for title, _ in EXPERIMENTS.values()) + " |",
        "| --- |" + " --- |" * len(EXPERIMENTS),
    ]
    for stage in (*STAGES, REST):
        cells = [_cell(found[name]["stages"], stage) for name in EXPERIMENTS]
        said.append(f"| {stage} | " + " | ".join(cells) + " |")
    whole = [f"{found[name]['stages']['step']:.2f} s" for name in EXPERIMENTS]
    said += ["| **whole step** | " + " | ".join(whole) + " |", "", *EXPLAINED]
    said += ["", *OPERATIONS_EXPLAINED]
    for name, (title, _) in EXPERIMENTS.items():
        said += ["", f"## Operations of {title}", "", "| operation | share | calls |"]
        said += ["| --- | --- | --- |"]
        for one in found[name]["operations"]:
            said.append(f"| `{one['name']}` | {one['share']:.1%} | {one['calls']} |")
    return "\n".join(said) + "\n"


EXPLAINED = [
    "Forward passes outside the update, such as old or reference log-probabilities, count as",
    "forward.",
]
OPERATIONS_EXPLAINED = [
    "The operations are those of one more step under torch's profiler, by self time, as shares of",
    "the total.",
]


def _cell(stages: dict[str, float], stage: str) -> str:
    return f"{stages[stage] / stages['step']:.1%} ({1000 * stages[stage]:.0f} ms)"


def picture(found: dict[str, Any]) -> None:
    """One bar per experiment, of its stages."""
    from rlx.evaluation.pictures import INK, build_figure, style_axes

    drawn = build_figure(9.6, 2.6)
    axes = drawn.subplots()
    style_axes(axes)
    names = list(EXPERIMENTS)[::-1]
    left = [0.0] * len(names)
    for stage, colour in zip((*STAGES, REST), COLOURS, strict=True):
        shares = [found[n]["stages"][stage] / found[n]["stages"]["step"] for n in names]
        axes.barh([EXPERIMENTS[n][0] for n in names], shares, left=left, color=colour, label=stage)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.set_xlabel("share of a step's wall time", color=INK)
    drawn.legend(loc="outside upper center", ncols=5, frameon=False, labelcolor=INK)
    drawn.savefig(PICTURE, dpi=160)


def main() -> None:
    """Profiles every experiment and writes the page."""
    found = {}
    alone = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "DS_ACCELERATOR": "cpu"}
    for name in EXPERIMENTS:
        with tempfile.TemporaryDirectory() as place:
            target = Path(place) / "found.json"
            command = [sys.executable, __file__, name, str(target)]
            subprocess.run(command, check=True, env={**os.environ, **alone})
            found[name] = json.loads(target.read_text())
    PAGE.write_text(page(found))
    picture(found)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        profile(sys.argv[1], Path(sys.argv[2]))
    else:
        main()
