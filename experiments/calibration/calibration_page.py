"""`make suite`: compares centred and σ-normalized confidences on experiments/rlcr_asked.yaml.

    python experiments/calibration/calibration_page.py

Trains the missing runs (three seeds each), evaluates every run on problem sets near training and
far from it, and writes calibration.md with its pictures. Runs are stored in RLX_HOME, so an
interrupted command continues where it stopped.
"""

import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "make"))
from rlx_command import ROOT, rlx

from rlx_registry import Registry

SPEC = "experiments/rlcr_asked.yaml"
SUITE = "experiments/suites/rlcr.yaml"
VARIES = "estimator.confidence.normalize"
ARMS = ("center", "std")
PAGE = Path(__file__).with_name("calibration.md")
PICTURES = PAGE.with_name("pictures")
SHOWN = ("reliability", "risk_coverage", "confidence", "scaling")

HEAD = """# Calibration, near training and far from it

Written by `make suite`: `{spec}` with confidences centred within an answer (`center`, its default)
and divided by σ (`std`, the formula of RLCR in two turns), seeds 0 to 2, everything else equal;
each model is then evaluated on `{suite}`. A run takes about three minutes on one CPU core.
`experiments/rlcr_exact.yaml` has no confidences to centre: it sums their expected score
([results](../LOG.md), seeds 10 to 13). Exploratory: seeds 0 to 2 also served trials of
this recipe; p is not corrected over measures or sets, and with three seeds it cannot be below .25.
ECE is not debiased.

    rlx submit {spec} --seeds 0..2 --grid {varies}=center,std
    rlx eval RUN --suite {suite}
    rlx compare RUN...

"""


def trained() -> dict[str, list[str]]:
    """Trains the missing runs and returns the run ids of each arm, in order of seed."""
    rlx("submit", SPEC, "--seeds", "0..2", "--grid", f"{VARIES}={','.join(ARMS)}")
    from rlx.home import tracking_url

    with Registry.open(tracking_url("sqlite:///{home}/registry.db"), read_only=True) as registry:
        runs = [run for run in registry.runs(name="rlcr-asked") if run.status == "finished"]
    newest: dict[tuple[str, int], str] = {}
    for run in runs:
        newest.setdefault((run.spec["estimator"]["confidence"]["normalize"], run.seed), run.id)
    return {arm: [newest[arm, seed] for seed in range(3)] for arm in ARMS}


def main() -> None:
    arms = trained()
    PICTURES.mkdir(exist_ok=True)
    for arm, runs in arms.items():
        for seed, run in enumerate(runs):
            with tempfile.TemporaryDirectory() as folder:
                rlx("eval", run, "--suite", SUITE, "--pictures", folder)
                for name in SHOWN if seed == 0 else ():
                    shutil.copy(Path(folder) / f"{name}.png", PICTURES / f"{arm}_{name}.png")
    table = rlx("compare", *(run for runs in arms.values() for run in runs), "--md", quiet=True)
    parts = [HEAD.format(spec=SPEC, suite=SUITE, varies=VARIES), table, "\n## Pictures, seed 0\n"]
    for name in SHOWN:
        pictures = " ".join(f"![{arm}: {name}](pictures/{arm}_{name}.png)" for arm in ARMS)
        parts.append(f"\n`center`, then `std`: {name.replace('_', ' ')}\n\n{pictures}\n")
    PAGE.write_text("".join(parts), encoding="utf-8")
    print(PAGE.relative_to(ROOT))


if __name__ == "__main__":
    main()
