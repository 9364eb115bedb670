"""Converts checkpoints with DeepSpeed's universal format, so that any number of ranks can load
them.

The conversion reads checkpoints of ZeRO stages 1 to 3; those of stage 0 are not sharded. Run as a
program, this module performs the conversion.
"""

import os
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import torch
from torch import Tensor

from rlx.errors import RlxError
from rlx.importing import speed_up_imports

WHOLE = "mp_rank_00_model_states.pt"
"""Contains all weights in training precision, under ZeRO stages 0 to 2."""
SPREAD = "zero_pp_rank_0_mp_rank_00_model_states.pt"


def load_consolidated_weights(folder: Path) -> dict[str, Tensor]:
    """Loads full weights from a `TrainingEngine.save` folder, by parameter name, on the CPU.

    Under ZeRO stage 3 they are float32, otherwise in training precision.
    """
    if (folder / WHOLE).exists():
        # A pickle written by rlx; the caller has verified its digest.
        state = torch.load(folder / WHOLE, map_location="cpu", weights_only=False)
        return dict(state["module"])
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):  # DeepSpeed prints progress
        return dict(get_fp32_state_dict_from_zero_checkpoint(str(folder.parent), tag=folder.name))


def convert_checkpoints(sources: Iterable[Path], target: Path) -> None:
    """Converts `TrainingEngine.save` folders of stages 1 to 3 for
    `TrainingEngine.load(universal=True)`.

    Each is written to `target` under its own name, by a separate process, which frees its memory
    when it exits.

    Raises:
        RlxError: the conversion failed.
    """
    done = subprocess.run(
        # Run by path, because `-m` would import the whole package; -P keeps the modules of its
        # folder off sys.path.
        [sys.executable, "-P", __file__, *map(str, sources), str(target)],
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RlxError(
            "DeepSpeed cannot convert the checkpoint for another number of ranks or another ZeRO "
            f"stage; resume with those that wrote it. DeepSpeed's output:\n{done.stderr[-2000:]}"
        )


def _convert_checkpoint_folder(source: Path, target: Path) -> None:
    """Converts one folder, and adds the weights that DeepSpeed omits."""
    from deepspeed.checkpoint import ds_to_universal

    options = {"num_extract_workers": 1, "num_merge_workers": 1, "inject_missing_state": True}
    folders = {"input_folder": str(source), "output_folder": str(target)}
    ds_to_universal.main(Namespace(**folders, **options, strict=True, keep_temp_folder=False))
    (target.parent / "latest_universal").unlink()  # rlx names checkpoints itself
    for name, value in load_consolidated_weights(source).items():
        file = target / "zero" / name / "fp32.pt"
        if not file.exists():  # frozen, and written under stage 3
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"param": value.float().clone()}, file)
    _complete_stage_files(target)


def _complete_stage_files(folder: Path) -> None:
    """Writes the optimizer state to both places in which stage 3 and the lower stages look."""
    (found,) = {WHOLE, SPREAD} & {file.name for file in folder.iterdir()}
    (other,) = {WHOLE, SPREAD} - {found}
    shutil.copy(folder / found, folder / other)
    file = folder / "zero" / "optimizer_state.pt"
    common = torch.load(file, weights_only=False)
    learned = [file.parent for file in folder.glob("zero/*/exp_avg.pt")]
    if found == WHOLE:
        step = torch.load(learned[0] / "step.pt", weights_only=True)
    else:
        step = common["optimizer_state_dict"]["state"][0]["step"]
        for parameter in learned:
            for kind in parameter.iterdir():
                torch.save({"param": torch.load(kind, weights_only=True)}, kind)
            torch.save(step, parameter / "step.pt")
    states = torch.load(folder / found, map_location="cpu", weights_only=False)
    groups = common["param_groups"]
    state = {"param_groups": groups, "ds_version": states["ds_version"]}
    state["optimizer_state_dict"] = {"state": {0: {"step": step}}, "param_groups": groups}
    torch.save(state, file)


if __name__ == "__main__":
    with speed_up_imports():
        pass
    *sources, target = map(Path, sys.argv[1:])
    for folder in sources:
        _convert_checkpoint_folder(folder, target / folder.name)
