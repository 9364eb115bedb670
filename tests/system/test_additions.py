"""A stream, an estimator and a placement are each added by a new file and two others at most.

The diffs in `additions/` are those of docs/architecture.md. Each is applied to a copy of the
sources, which then plans an experiment with what was added.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DIFFS = {path.stem: path.read_text() for path in (Path(__file__).parent / "additions").iterdir()}
PACKAGES = ("platform", "registry", "web", "plugins")
QUICK = ROOT / "experiments" / "quick.yaml"
MAIN = "import sys; from rlx.cli import main; sys.exit(main())"


@pytest.fixture
def extend(tmp_path):
    """Applies one of the diffs to a copy of the sources; returns what runs Python in it."""

    def apply(name, **modules):
        skip = shutil.ignore_patterns("__pycache__")
        for package in PACKAGES:
            shutil.copytree(ROOT / package, tmp_path / package, ignore=skip)
        shutil.copy(ROOT / "pyproject.toml", tmp_path)
        patch = ("git", "apply", "--whitespace=error", "-")
        subprocess.run(patch, cwd=tmp_path, input=DIFFS[name], text=True, check=True)
        write_metadata(tmp_path)
        for module, source in modules.items():
            (tmp_path / f"{module}.py").write_text(source)
        paths = [tmp_path, *(tmp_path / package for package in PACKAGES)]
        path = os.pathsep.join(map(str, paths))

        def run(code, *arguments):
            return subprocess.run(
                [sys.executable, "-c", code, *map(str, arguments)],
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": path, "RLX_HOME": str(tmp_path / "home")},
                capture_output=True,
                text=True,
            )

        return run

    return apply


def write_metadata(folder):
    """The entry points of the copied pyproject.toml, as an installer writes them."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    info = folder / f"rlx-{project['version']}.dist-info"
    info.mkdir()
    about = f"Metadata-Version: 2.1\nName: rlx\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(about)
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{point} = {value}" for point, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


def plan(run, *sets):
    """The plan of the smoke test with these settings, as JSON."""
    overrides = [f"--set={one}" for one in sets]
    done = run(MAIN, "plan", QUICK, "--json", *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_the_docs_show_these_diffs():
    text = (ROOT / "docs" / "architecture.md").read_text()
    assert re.findall(r"```diff\n(.*?)```", text, re.DOTALL) == [
        DIFFS[name] for name in ("stream", "estimator", "placement")
    ]


@pytest.mark.parametrize("name", DIFFS)
def test_one_file_is_new_and_two_others_change_at_most(name):
    files = re.findall(r"^--- (\S+)$", DIFFS[name], re.MULTILINE)
    assert files.count("/dev/null") == 1
    assert len(files) <= 3


READER = '''
from typing import ClassVar
from rlx.plugin import Estimator

class Reader(Estimator):
    """Tokens still to come."""
    implementation: ClassVar[str] = "reader_rule:estimate"
    needs: ClassVar[frozenset[str]] = frozenset({"tokens_left"})
'''
RULE = """
import torch

def estimate(inputs):
    return torch.where(inputs.mask, inputs.stream("tokens_left"), 0.0)
"""
STREAM = """
import json
from rlx.discovery import import_implementation, list_providers
from rlx.record.rollouts import TOKEN_COLUMNS
from rlx.run.streams import StepInputs
from rlx.testing import example_batch
from rlx.train_batch import ScoredRows
from rlx_web.pages.credit import CHANNELS
(provider,) = list_providers({"tokens_left"})
batch = example_batch()
rows = ScoredRows(batch=batch, rewards=None, mask=batch.is_own)
inputs = StepInputs(context=None, recipe=None, rows=rows, rollouts=None, cursor=0)
left = import_implementation(provider.implementation)(inputs)["tokens_left"]
print(json.dumps({
    "column": str(TOKEN_COLUMNS["tokens_left"]),
    "channel": CHANNELS["tokens left"],
    "first": left.max(dim=1).values.tolist(),
    "own": batch.is_own.sum(dim=1).tolist(),
}))
"""


def test_a_stream(extend):
    run = extend("stream")
    done = run(STREAM)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["column"], found["channel"]) == ("torch.float32", "tokens_left")
    assert found["first"] == found["own"]


def test_a_stream_that_an_estimator_needs_is_made_up_by_a_plan(extend, tmp_path):
    run = extend("stream", reader=READER, reader_rule=RULE)
    info = tmp_path / "reader-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: reader\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rlx.estimators]\nreader = reader:Reader\n")
    report = plan(run, "estimator.name=reader")
    assert all("tokens left" in phase["made_up"] for phase in report["phases"])


def test_an_estimator_with_two_options(extend):
    run = extend("estimator")
    report = plan(run, "estimator={name: regret, margin: 0.25, scale: 2}")
    advantages = [
        token["advantage"]
        for phase in report["phases"]
        for row in phase["rows"]
        for token in row["tokens"]
    ]
    assert min(advantages) < 0 and max(advantages) == 0
    done = run(MAIN, "plugins", "check", "regret")
    assert done.returncode == 0 and "promises hold" in done.stdout, done.stdout + done.stderr


def test_a_placement(extend):
    run = extend("placement")
    report = plan(run, "estimator.name=reinforce_plus_plus", "credit.placement=turn_start")
    rows = [row for phase in report["phases"] for row in phase["rows"]]
    paid = [[token for token in row["tokens"] if token["placed"]] for row in rows]
    assert any(paid)
    for row, tokens in zip(rows, paid, strict=True):
        first = next((token for token in row["tokens"] if token["learns"]), None)
        assert tokens in ([], [first])
    done = run(MAIN, "plugins", "check", "turn_start")
    assert done.returncode == 0 and "promises hold" in done.stdout, done.stdout + done.stderr
