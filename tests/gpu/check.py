"""Checks rlx on a machine with a GPU, part by part; one JSON comes out.

    make gpu-check [WHEELS=folder] [ARGS="--only sampler"]

A part has at most eight minutes for all that it starts. What it prints is in gpu-check/, where it
is as it comes. Parts that have passed are not run again unless they are asked for.
`tests/gpu/wheels.py` fetches the packages that must be brought along where there is no network.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlx.descendants import adopt_orphans, kill_descendants

HERE = Path(__file__).parent
LONGEST = {"cuda": 480.0, "cpu": 1800.0}
"""Seconds of one part; on a CPU nothing is lent, and other work may be going on."""
SKIPPED = 77
"""The exit code of a part that lacks something, and says what."""
MATHEMATICS = ("credit", "kl", "loss", "mask", "step", "batch", "reward", "rollout")


def script(name: str, *arguments: str) -> list[str]:
    return [str(HERE / f"{name}.py"), "DEVICE", *arguments]


def tests(*rooms: str) -> list[str]:
    """Tests of rooms that compute. Other versions of the libraries are here than in CI, and with
    them other warnings."""
    quietly = ["-q", "-o", "filterwarnings=default", "-p", "no:cacheprovider"]
    return ["-m", "pytest", *quietly, *(str(HERE.parent / room) for room in rooms)]


PROFILES = ("rlcr_1.5b", "countdown_1.5b", "rlcr_coupled_1.5b", "kg_1.5b")
PARTS = {
    "machine": script("machine"),
    "learner": script("gpu_kernels", "learner"),
    "sampler": script("gpu_kernels", "sampler"),
    **{name: script("runs", "stages", name) for name in PROFILES},
    "kill_quick": script("runs", "kill", "quick"),
    "kill_rlcr_1.5b": script("runs", "kill", "rlcr_1.5b"),
    "vllm": script("runs", "stages", "rlcr_1.5b", "sampler={engine: vllm}"),
    "two_gpus": script("runs", "stages", "rlcr_1.5b", "runner.ranks=2"),
    "tests_sampler": tests("sampler"),
    "tests_learner": tests("learner"),
    "tests_others": tests(*MATHEMATICS),
    "smollm2_grpo": script("runs", "stages", "smollm2_grpo"),
    "kill_smollm2": script("runs", "kill", "smollm2_grpo"),
    "smollm2_rlcr": script("runs", "stages", "smollm2_rlcr"),
}
"""What Python is called with, in the order of what one would want to know first."""
GROUPS = {"smollm2": ("machine", "smollm2_grpo", "kill_smollm2", "smollm2_rlcr", "rlcr_1.5b")}
"""Parts that one name stands for: what is asked first of fifteen minutes on a GPU."""


def run_part(name: str, device: str, logs: Path) -> dict[str, Any]:
    """Runs a part, and ends what it has left; returns how it went, with the figures it printed."""
    command = [device if word == "DEVICE" else word for word in PARTS[name]]
    variables = {"OMP_WAIT_POLICY": "PASSIVE", "RLX_TEST_DEVICE": device}
    variables |= {"HF_HUB_OFFLINE": "1"} if device == "cuda" else {}
    began, said, complained = time.monotonic(), logs / f"{name}.out", logs / f"{name}.err"
    with said.open("w") as out, complained.open("w") as err:
        process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={**os.environ, **variables},
        )
        try:
            code = process.wait(LONGEST[device])
            why = f"exit code {code}" if code not in (0, SKIPPED) else ""
        except subprocess.TimeoutExpired:
            code, why = None, f"no end after {LONGEST[device]:.0f} s"
        finally:
            kill_descendants()
    lines = said.read_text(errors="replace").splitlines()
    result = {"ok": not why, "seconds": round(time.monotonic() - began, 1), "figures": {}}
    for line in lines:
        with suppress(ValueError, TypeError):  # what else is printed is no figure
            result["figures"] |= json.loads(line)
    if code == SKIPPED:
        result["skipped"] = lines[-1]
    if why:
        result |= {"why": why, "output": complained.read_text(errors="replace")[-4000:]}
    return result


def main() -> int:
    """Runs the parts that are still to be run; 0 when all have passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-check.json"))
    parser.add_argument("--device", choices=list(LONGEST), default="cuda")
    parser.add_argument("--only", choices=[*PARTS, *GROUPS], action="append")
    options = parser.parse_args()
    adopt_orphans()
    report = {"device": options.device, "parts": {}}
    if options.out.exists():
        earlier = json.loads(options.out.read_text())
        report = earlier if earlier["device"] == options.device else report
    parts, logs = report["parts"], options.out.with_suffix("")
    logs.mkdir(exist_ok=True)
    asked = [one for name in options.only or () for one in GROUPS.get(name, [name])]
    for name in asked or [name for name in PARTS if not parts.get(name, {}).get("ok")]:
        parts[name] = result = run_part(name, options.device, logs)
        options.out.write_text(json.dumps(report, indent=2) + "\n")
        word = result.get("skipped", "passed")
        if not result["ok"]:
            word = f"FAILED: {result['why']}\n{result['output'][-600:]}"
        print(f"{name:<18} {word}  ({result['seconds']} s)", flush=True)
    passed = sum(result["ok"] for result in parts.values())
    print(f"{passed} of {len(PARTS)} parts passed; written to {options.out}")
    return 0 if all(parts[name]["ok"] for name in asked or PARTS) else 1


if __name__ == "__main__":
    sys.exit(main())
