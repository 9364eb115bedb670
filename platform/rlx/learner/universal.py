"""Checkpoints that any number of ranks can load, made by DeepSpeed's own conversion.

It reads what ZeRO stages 1 to 3 write. Stage 0 shards nothing, so what it writes is loaded by any
number of ranks as it is. Run as a program, this module converts.
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

__all__ = ["convert_checkpoints", "frozen_value", "load_consolidated_weights"]

WHOLE = "mp_rank_00_model_states.pt"
"""Holds every weight as it is trained, where no stage above 2 has spread them."""
SPREAD = "zero_pp_rank_0_mp_rank_00_model_states.pt"


def load_consolidated_weights(folder: Path) -> dict[str, Tensor]:
    """Whole weights of what `Engine.save` wrote, by the module's parameter names, on the CPU.

    Those of ZeRO stage 3 are float32, others in the precision that they are trained in.
    """
    if (folder / WHOLE).exists():
        # A pickle of our own: whoever calls has compared it with its digest.
        state = torch.load(folder / WHOLE, map_location="cpu", weights_only=False)
        return dict(state["module"])
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):  # it talks to its own users
        return dict(get_fp32_state_dict_from_zero_checkpoint(str(folder.parent), tag=folder.name))


def convert_checkpoints(sources: Iterable[Path], target: Path) -> None:
    """Makes of what `Engine.save` wrote folders that `Engine.load(universal=True)` takes.

    A process of its own does it: it needs the memory of a whole model, and gives it back.

    Args:
        sources: each written under ZeRO stage 1, 2 or 3.
        target: folder in which each finds its own under its name.

    Raises:
        RlxError: the conversion failed.
    """
    done = subprocess.run(
        # By its path, and -P against modules beside it: as a module it would bring the whole room.
        [sys.executable, "-P", __file__, *map(str, sources), str(target)],
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RlxError(
            "DeepSpeed cannot convert the checkpoint for other ranks or another ZeRO stage; go on "
            f"with those that wrote it. It said:\n{done.stderr[-2000:]}"
        )


def frozen_value(folder: Path, name: str) -> Tensor:
    """A parameter that does not learn, from a converted folder."""
    stored = torch.load(folder / "zero" / name / "fp32.pt", weights_only=True)
    return torch.as_tensor(stored["param"])


def _convert_checkpoint_folder(source: Path, target: Path) -> None:
    """Converts one folder, and adds what DeepSpeed leaves out."""
    from deepspeed.checkpoint import ds_to_universal

    options = {"num_extract_workers": 1, "num_merge_workers": 1, "inject_missing_state": True}
    folders = {"input_folder": str(source), "output_folder": str(target)}
    ds_to_universal.main(Namespace(**folders, **options, strict=True, keep_temp_folder=False))
    (target.parent / "latest_universal").unlink()  # names are ours to give
    for name, value in load_consolidated_weights(source).items():
        file = target / "zero" / name / "fp32.pt"
        if not file.exists():  # frozen, and written under stage 3
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"param": value.float().clone()}, file)
    _complete_stage_files(target)


def _complete_stage_files(folder: Path) -> None:
    """Stage 3 and the stages below it look for the same things in different places: fills both."""
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
    told = {"param_groups": groups, "ds_version": states["ds_version"]}
    told["optimizer_state_dict"] = {"state": {0: {"step": step}}, "param_groups": groups}
    torch.save(told, file)


if __name__ == "__main__":
    with speed_up_imports():
        pass
    *sources, into = map(Path, sys.argv[1:])
    for folder in sources:
        _convert_checkpoint_folder(folder, into / folder.name)
