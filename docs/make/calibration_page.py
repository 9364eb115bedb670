"""`make suite`: experiments/rlcr_asked.yaml, centred and divided by σ, three seeds each.

    python docs/make/calibration_page.py

Trains what is missing of the group, evaluates every run on sets near training and far from it, and
writes docs/calibration.md with its pictures. RLX_HOME says where runs are kept: the same command
goes on where it was stopped.
"""

import shutil
import tempfile
from pathlib import Path

from rlx_command import ROOT, rlx

from rlx_registry import Registry

SPEC = "experiments/rlcr_asked.yaml"
SUITE = "experiments/suites/rlcr.yaml"
VARIES = "estimator.confidence.normalize"
ARMS = ("center", "std")
PAGE = ROOT / "docs" / "calibration.md"
PICTURES = ROOT / "docs" / "calibration"
SHOWN = ("reliability", "risk_coverage", "confidence", "scaling")

HEAD = """# Calibration, near training and far from it

Written by `make suite`: `{spec}` with confidences centred within an answer (`center`, its own way)
and divided by σ (`std`, the formula as design 004 writes it), seeds 0 to 2, everything else alike;
each model then answers `{suite}`. A run takes about three minutes of one CPU core.

    rlx submit {spec} --seeds 0..2 --grid {varies}=center,std
    rlx eval RUN --suite {suite}
    rlx compare RUN...

"""


def trained() -> dict[str, list[str]]:
    """The runs of each arm, by seed."""
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
        shown = " ".join(f"![{arm}: {name}](calibration/{arm}_{name}.png)" for arm in ARMS)
        parts.append(f"\n`center`, then `std`: {name.replace('_', ' ')}\n\n{shown}\n")
    PAGE.write_text("".join(parts), encoding="utf-8")
    print(PAGE.relative_to(ROOT))


if __name__ == "__main__":
    main()
