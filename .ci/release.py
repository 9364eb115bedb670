"""`make release VERSION=1.2.3`: prepares a release and checks it; a dry run unless told otherwise.

    python .ci/release.py VERSION [--really] [--upload] [--into dist]

The release is made in a temporary clone of the commit that is checked out. Its version and its
changelog section are set and committed there, wheel and source archive are built twice and
compared, and the wheel is installed into an environment of its own and used from an empty folder.
`--really` then brings that commit and its tag into this checkout; `--upload` also sends the files
to the package index. Nothing is pushed.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from packaging.version import InvalidVersion, Version

__all__ = ["date_changelog", "main"]

VERSION_FILES = ("pyproject.toml", "platform/rlx/__init__.py")
VERSION_LINE = re.compile(r'^((?:__version__|version) = )"([^"]+)"$', re.MULTILINE)
HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
RESERVED = re.compile(r"(^|\.)(example(\.(com|net|org))?|invalid)$")
"""Hosts that RFC 2606 reserves for documentation."""


def call(*command: str | Path, at: Path, env: Mapping[str, str] | None = None) -> str:
    """Runs a command and returns its output.

    Raises:
        SystemExit: the command failed; the message has its output.
    """
    done = subprocess.run(
        command,
        cwd=at,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        line = " ".join(map(str, command))
        sys.exit(f"error: `{line}` ended with {done.returncode}\n{done.stdout.strip()}")
    return done.stdout.strip()


def check_checkout(root: Path, version: Version) -> None:
    """Refuses a checkout with changes, and a version that is not newer than every tag."""
    if changes := call("git", "status", "--porcelain", at=root):
        sys.exit(f"error: the checkout has changes that are not committed:\n{changes}")
    for tag in call("git", "tag", "--list", "v[0-9]*", at=root).split():
        try:
            released = Version(tag)
        except InvalidVersion:
            continue
        if released >= version:
            sys.exit(f"error: {version} is not newer than {released}, which has the tag {tag}")


def date_changelog(text: str, version: Version, day: str) -> str:
    """Puts the version and the day into the heading of the unreleased section.

    Raises:
        SystemExit: the first section is another one, or is empty.
    """
    first = HEADING.search(text)
    expected = ("Unreleased", f"{version} (unreleased)")
    if not first or first[1] not in expected:
        found = f"'## {first[1]}'" if first else "no section"
        wanted = " or ".join(f"'## {heading}'" for heading in expected)
        sys.exit(f"error: CHANGELOG.md: expected {wanted} as the first section, found {found}")
    following = HEADING.search(text, first.end())
    if not text[first.end() : following.start() if following else None].strip():
        sys.exit(f"error: CHANGELOG.md: the section '## {first[1]}' is empty")
    return f"{text[: first.start()]}## {version} ({day}){text[first.end() :]}"


def set_version(root: Path, version: Version) -> None:
    """Writes the version where it is stated."""
    for name in VERSION_FILES:
        file = root / name
        text, count = VERSION_LINE.subn(rf'\g<1>"{version}"', file.read_text())
        if count != 1:
            sys.exit(f"error: {name}: expected one line with the version, found {count}")
        file.write_text(text)


def commit_release(root: Path, clone: Path, version: Version) -> None:
    """Commits and tags the release in the clone, by the committer of the checkout."""
    day = datetime.now(UTC).date().isoformat()
    changelog = clone / "CHANGELOG.md"
    changelog.write_text(date_changelog(changelog.read_text(), version, day))
    set_version(clone, version)
    for key in ("user.name", "user.email"):
        call("git", "config", key, call("git", "config", key, at=root), at=clone)
    call("git", "commit", "--all", "--message", f"Version {version}", at=clone)
    call("git", "tag", "--annotate", f"v{version}", "--message", f"rlx {version}", at=clone)


def take_over(root: Path, clone: Path) -> None:
    """Brings the commit of the release and its tag into the checkout."""
    call("git", "pull", "--quiet", "--ff-only", "--tags", clone, "HEAD", at=root)


def digest(file: Path) -> str:
    """The SHA-256 digest of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def build(source: Path, into: Path, when: str, *targets: str) -> list[Path]:
    """Builds packages whose times are those of the commit."""
    options = [part for target in targets for part in ("--target", target)]
    hatchling = (sys.executable, "-m", "hatchling", "build", "--directory", str(into))
    call(*hatchling, *options, at=source, env={"SOURCE_DATE_EPOCH": when})
    return sorted(into.iterdir())


def build_packages(clone: Path, scratch: Path) -> list[Path]:
    """Builds source archive and wheel; the wheel built from the archive must be the same."""
    when = call("git", "log", "-1", "--format=%ct", at=clone)
    built = build(clone, scratch / "dist", when, "sdist", "wheel")
    archive, wheel = (
        next(file for file in built if file.name.endswith(ending)) for ending in (".tar.gz", ".whl")
    )
    with tarfile.open(archive) as content:
        content.extractall(scratch / "source", filter="data")
    (source,) = (scratch / "source").iterdir()
    (again,) = build(source, scratch / "again", when, "wheel")
    if digest(again) != digest(wheel):
        sys.exit(f"error: {wheel.name} differs when it is built from {archive.name}")
    print(f"✓ {wheel.name} is the same when built from {archive.name}")
    return [archive, wheel]


def check_metadata(files: list[Path], scratch: Path, required: bool) -> None:
    """Checks the metadata and the README as the package index will."""
    if find_spec("twine"):
        call(sys.executable, "-m", "twine", "check", "--strict", *files, at=scratch)
        print("✓ twine accepts metadata and README")
    elif required:
        sys.exit("error: twine is not installed: pip install 'rlx[release]'")
    else:
        print("– twine is not installed, metadata not checked: pip install 'rlx[release]'")


def try_wheel(wheel: Path, version: Version, scratch: Path) -> None:
    """Installs the wheel into a new environment and uses it from an empty folder.

    The environment sees the dependencies of this one, but not the checkout: Python does not follow
    the links of editable installations there.
    """
    environment, empty = scratch / "environment", scratch / "empty"
    call(sys.executable, "-m", "venv", "--without-pip", environment, at=scratch)
    python = environment / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile")
    call(*pip, "--no-deps", "--no-index", wheel, at=scratch)
    (site,) = (environment / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    empty.mkdir()
    own = {"PYTHONPATH": "", "RLX_HOME": str(empty / ".rlx"), "COLUMNS": "100"}

    def rlx(*arguments: str) -> str:
        return call(environment / "bin" / "rlx", *arguments, at=empty, env=own)

    where = Path(call(python, "-c", "import rlx; print(rlx.__file__)", at=empty, env=own))
    if not where.is_relative_to(environment.resolve()):
        sys.exit(f"error: the new environment imports {where}, not the wheel")
    if (said := rlx("--version")) != f"rlx {version}":
        sys.exit(f"error: the wheel says {said!r}, expected 'rlx {version}'")
    rlx("new", "--from", "quick")
    print(f"✓ {said} from an empty folder: {rlx('validate', 'quick.yaml')}")


def check_address(clone: Path) -> None:
    """Refuses to upload packages whose README points to an address that does not exist."""
    urls = tomllib.loads((clone / "pyproject.toml").read_text())["project"]["urls"]
    for name, address in urls.items():
        if RESERVED.search(urlsplit(address).hostname or ""):
            sys.exit(f"error: pyproject.toml: project.urls.{name} is a placeholder: {address}")


def main() -> None:
    """Makes the release in a temporary clone; takes it over when asked to."""
    parser = argparse.ArgumentParser(description="Prepare and check a release.")
    parser.add_argument("version", metavar="VERSION", type=Version)
    parser.add_argument("--really", action="store_true", help="commit and tag in this checkout")
    parser.add_argument("--upload", action="store_true", help="also upload; needs --really")
    parser.add_argument("--into", metavar="FOLDER", default="dist", help="where packages are put")
    options = parser.parse_args()
    if options.upload and not options.really:
        parser.error("--upload needs --really")
    version, tag = options.version, f"v{options.version}"
    root = Path(call("git", "rev-parse", "--show-toplevel", at=Path.cwd()))
    check_checkout(root, version)
    with tempfile.TemporaryDirectory(prefix="rlx-release-") as folder:
        scratch = Path(folder)
        clone = scratch / "clone"
        call("git", "clone", "--quiet", "--no-tags", root, clone, at=root)
        commit_release(root, clone, version)
        print(f"✓ commit and tag {tag}, CHANGELOG.md dated")
        if options.upload:
            check_address(clone)
        files = build_packages(clone, scratch)
        check_metadata(files, scratch, required=options.really)
        try_wheel(files[1], version, scratch)
        if options.really:
            take_over(root, clone)
        into = root / options.into
        into.mkdir(parents=True, exist_ok=True)
        kept = [Path(shutil.copy2(file, into)) for file in files]
    for file in kept:
        print(f"  {digest(file)}  {os.path.relpath(file)}")
    if options.upload:
        call(sys.executable, "-m", "twine", "upload", "--non-interactive", *kept, at=root)
        print(f"✓ rlx {version} uploaded")
    if options.really:
        print(f"publish it:  git push origin HEAD {tag}")
    else:
        print(
            f"dry run: nothing changed; release it:  make release VERSION={version} ARGS=--really"
        )


if __name__ == "__main__":
    main()
