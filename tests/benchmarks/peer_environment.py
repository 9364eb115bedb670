"""Environments of peers below .bench/, made where they are missing or their pins have changed."""

import subprocess
import venv
from pathlib import Path

QUIET = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
UNUSED = ("torchvision", "torchaudio", "torchcodec")
"""What peers ask for and no text needs; beside a CPU build of torch their wheels do not load."""


def make_peer_environment(pins: Path) -> Path:
    """The Python of an environment with what a file pins."""
    folder = Path(__file__).parents[2] / ".bench" / pins.stem
    python, stamp = folder / "bin" / "python", folder / "installed.txt"
    if not stamp.exists() or stamp.read_text() != pins.read_text():
        print(f"installing {pins.stem} into {folder}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "-r", pins], check=True)
        subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "-y", *UNUSED], check=True)
        stamp.write_text(pins.read_text())
    return python
