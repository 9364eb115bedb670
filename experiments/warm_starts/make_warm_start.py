"""Makes the shipped result of an experiment's warm start, or checks that it comes out again.

    python experiments/warm_starts/make_warm_start.py experiments/rlcr.yaml          # a few minutes
    python experiments/warm_starts/make_warm_start.py experiments/rlcr.yaml --check

Runs of that experiment on a CPU begin with the result in place of training it.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from rlx.model import build_demonstration_batches, build_policy, warm_start_policy
from rlx.model.warm_start import (
    MANIFEST,
    ORIGIN,
    compute_demonstration_digest,
    compute_settings_digest,
)
from rlx.phase_setup import build_setup
from rlx.plan import read_spec
from rlx.sealed_folder import write_manifest

HERE = Path(__file__).parent
WEIGHTS = "model.safetensors"


def train(file: Path, cache: Path) -> tuple[Path, str]:
    """Trains the warm start of an experiment; returns its folder and its digest of settings."""
    spec = read_spec(file, []).spec
    setup = build_setup(spec)
    policy = build_policy(spec.model, spec.seed)
    batches = build_demonstration_batches(policy, spec, setup.demonstrations, setup.environment)
    folder = warm_start_policy(
        policy,
        spec,
        setup.demonstrations,
        cache,
        lambda step, steps, loss: print(f"\r{step}/{steps}  loss {loss:.3f}", end=""),
        setup.environment,
        use_shipped=False,
    )
    assert folder is not None, f"{file} has no warm start"
    origin = {
        "command": f"python experiments/warm_starts/{Path(__file__).name} {file}",
        "torch": torch.__version__,
        "demonstrations": compute_demonstration_digest(batches),
    }
    (folder / ORIGIN).write_text(json.dumps(origin, indent=1) + "\n")
    (folder / MANIFEST).unlink()
    write_manifest(folder)
    return folder, compute_settings_digest(batches.player, policy)


def compare(shipped: Path, made: Path) -> float:
    """Largest distance between two weights."""
    old, new = load_file(shipped / WEIGHTS), load_file(made / WEIGHTS)
    assert old.keys() == new.keys()
    return max(float((old[name] - new[name]).abs().max()) for name in old)


def main(file: Path, *, check: bool) -> int:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as cache:
        made, name = train(file, Path(cache))
        shipped = HERE / name
        if not check:
            shutil.rmtree(shipped, ignore_errors=True)
            shutil.copytree(made, shipped)
            print(f"\n{shipped}")
            return 0
        distance = compare(shipped, made)
        print(f"\n{shipped.name}: weights differ by at most {distance:g}")
        return int(distance > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), check="--check" in sys.argv))
