"""Three steps of a profile with random weights, or all of an experiment on a pretrained model: the
peak of each stage beside the plan's.

    python tests/gpu/stages.py NAME cuda|cpu [KEY=VALUE...]

On a CPU, sizes are those of a rehearsal. Prints figures as they come.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from figures import print_figure
from follow import follow_run
from profiles import open_profile

import rlx


def main(name: str, device: str, *overrides: str) -> None:
    """Plans, runs and compares."""
    with tempfile.TemporaryDirectory() as home:
        experiment = open_profile(name, device, Path(home), *overrides)
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


if __name__ == "__main__":
    main(*sys.argv[1:])
