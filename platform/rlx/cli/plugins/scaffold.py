"""`rlx plugins new`: writes a new distribution with a plugin from templates."""

import builtins
import keyword
import re
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template

from rlx import __version__
from rlx.discovery import Kind, list_installed_plugins
from rlx.errors import SpecError
from rlx.text import escape_unprintable

__all__ = ["KINDS", "write_plugin_scaffold"]

KINDS: tuple[Kind, ...] = (
    "reward",
    "task",
    "environment",
    "estimator",
    "mask",
    "schedule",
    "launcher",
)
"""Kinds that have templates."""

_IMPLEMENTATIONS: dict[Kind, str] = {
    "estimator": "advantages.py",
    "mask": "tokens.py",
    "launcher": "ranks.py",
}
"""The file of the function that a descriptor names, for kinds that have one."""

_is_name = re.compile(r"[a-z][a-z0-9_]*").fullmatch


def write_plugin_scaffold(name: str, kind: Kind, parent: Path) -> Path:
    """Writes a distribution that offers one plugin, and returns its folder.

    Args:
        name: name of the plugin in YAML.
        kind: one of `KINDS`.
        parent: folder to create the distribution's folder in.

    Raises:
        SpecError: the name is invalid or taken, or the folder exists already.
        OSError: the folder cannot be written.
    """
    package = f"rlx_{name}"
    _check_name(name, kind, package)
    distribution = re.sub("_+", "-", package).rstrip("-")
    folder = parent / distribution
    words = {
        "name": name,
        "attribute": name if kind == "reward" else "".join(map(str.title, name.split("_"))),
        "kind": kind,
        "package": package,
        "distribution": distribution,
        "version": __version__,
    }
    words["usage"] = _fill_scaffold_template(f"usage_{kind}.yaml", words)
    written = {
        "pyproject.toml": "pyproject.toml",
        "README.md": "README.md",
        f"{package}/__init__.py": f"{kind}.py",
        f"{package}/py.typed": None,
        f"tests/test_{name}.py": "test.py",
    }
    if code := _IMPLEMENTATIONS.get(kind):
        written[f"{package}/{code}"] = f"{kind}_{code}"
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise SpecError(
            f"{escape_unprintable(str(folder))} already exists; remove it, or choose --into"
        ) from None
    for path, template in written.items():
        file = folder / path
        file.parent.mkdir(exist_ok=True)
        file.write_text(
            _fill_scaffold_template(template, words) if template else "", encoding="utf-8"
        )
    return folder


def _fill_scaffold_template(template: str, words: dict[str, str]) -> str:
    text = files(__package__).joinpath("templates", f"{template}.tmpl").read_text(encoding="utf-8")
    return Template(text).substitute(words)


def _check_name(name: str, kind: Kind, package: str) -> None:
    """Raises SpecError unless the name is valid and free for a package and a plugin."""
    printable = escape_unprintable(name)
    if not _is_name(name):
        near = re.sub("[^a-z0-9]+", "_", name.lower()).strip("_")
        hint = f"; did you mean '{near}'?" if _is_name(near) else ""
        raise SpecError(
            f"'{printable}' cannot name a plugin: use a to z, 0 to 9 and _, beginning with a letter"
            f"{hint}"
        )
    if keyword.iskeyword(name) or hasattr(builtins, name) or name in KINDS:
        raise SpecError(f"'{printable}' cannot name a plugin: Python or rlx reserves it")
    if taken := [f for f in list_installed_plugins(kind) if f.name == name]:
        raise SpecError(
            f"{kind} plugin '{printable}' is provided by {taken[0].source}; choose another name"
        )
    if find_spec(package) is not None:
        raise SpecError(f"a package '{package}' is installed already; choose another name")
