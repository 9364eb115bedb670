"""What is here: the GPU, what kernels are compiled with, versions. `python machine.py cuda|cpu`."""

import shutil
import sys
import sysconfig
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from figures import print_figure

DEVICE = sys.argv[1]
HERE = torch.cuda.is_available()
HEADERS = Path(sysconfig.get_paths()["include"], "Python.h")
COMPILER = shutil.which("gcc") or shutil.which("cc")
PACKAGES = ("torch", "transformers", "deepspeed", "pydantic", "sqlalchemy", "rlx")
print_figure(
    "machine",
    device=torch.cuda.get_device_name() if HERE else "cpu",
    devices=torch.cuda.device_count(),
    memory_gb=torch.cuda.mem_get_info()[1] / 1e9 if HERE else None,
    bf16=HERE and torch.cuda.is_bf16_supported(),
    cuda=torch.version.cuda,
    python=sys.version.split()[0],
    packages={name: version(name) for name in PACKAGES},
    compiler=COMPILER,
    python_headers=HEADERS.exists(),
    free_gb=shutil.disk_usage(tempfile.gettempdir()).free / 1e9,
)
if DEVICE == "cuda" and not HERE:
    sys.exit("torch finds no CUDA device")
if DEVICE == "cuda" and not (COMPILER and HEADERS.exists()):
    sys.exit(f"Triton needs gcc and {HEADERS}: install both, such as gcc and python3-dev")
