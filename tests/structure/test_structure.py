"""Promises about the shape of the repository, kept by the machine."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

from rlx_registry import Registry

ROOT = Path(__file__).parents[2]

OURS = ("rlx", "rlx_registry", "rlx_web", "rlx_plugins", "rlx_gyms")
HEAVY = {"torch", "transformers", "vllm", "deepspeed", "mlflow", "pandas", "datasets", "peft"}


def test_rooms_are_entered_by_their_doors():
    """The direction of imports is for import-linter, in pyproject.toml."""
    graph = grimp.build_graph(*OURS, cache_dir=None)
    rooms = {
        name for name in graph.modules if name.startswith("rlx.") and graph.find_children(name)
    }
    past = [
        f"{importer} -> {name}"
        for name in graph.modules - rooms
        if (room := name.rpartition(".")[0]) in rooms
        for importer in graph.find_modules_that_directly_import(name)
        if importer != room and not importer.startswith(f"{room}.")
    ]
    assert past == [], "import these names from the room's __init__ instead"


RLCR = "experiments/rlcr.yaml"
SCORED = "tests/golden/countdown_cases.jsonl"
LARGE = """
from pathlib import Path
from rlx.plan import check_file, run_preflight_checks
run_preflight_checks(*check_file(Path("experiments/rlcr_1.5b.yaml")), elsewhere=True)
"""
OFFERED = """
import rlx, rlx_registry, rlx_web, rlx_plugins.countdown, rlx_gyms.reasoning
rlx.Run, rlx.score, rlx.read("experiments/rlcr.yaml")
"""
DATABASE = {"sqlalchemy"}
SCREEN = {"rich", "fastapi"}
DESCRIBING = {"pydantic", "yaml", "numpy", "rlx.spec"}


def list_imports(code, home):
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules, file=sys.stderr)"],
        cwd=ROOT,
        env=os.environ | {"RLX_HOME": str(home), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stderr.splitlines()[-1].split())


@pytest.mark.parametrize(
    ("verb", "code", "never"),
    [
        (["--version"], 0, {"click"} | DATABASE | SCREEN | DESCRIBING),
        (["--help"], 0, DATABASE | SCREEN | DESCRIBING),
        (["validate", RLCR], 0, DATABASE | SCREEN),
        (["score", "--reward=countdown", SCORED, "--json"], 0, DATABASE),
        (["plugins", "show", "countdown"], 0, DATABASE),
        (["plugins", "check", "rlcr.confidence"], 0, DATABASE),
        (["submit", RLCR, "--set=runner.device=cuda"], 4, set()),
        (["check"], 0, set()),
    ],
)
def test_what_must_start_fast_imports_nothing_heavy(verb, code, never, tmp_path):
    run = f"from rlx.cli import main; code = main({verb}); assert code == {code}, code"
    assert not (HEAVY | never) & list_imports(run, tmp_path)


@pytest.mark.parametrize("code", [LARGE, OFFERED, "import rlx.record.mlflow_tracker"])
def test_what_is_imported_for_every_command_imports_nothing_heavy(code, tmp_path):
    assert not HEAVY & list_imports(code, tmp_path)


def test_what_is_asked_for_often_imports_only_what_it_needs(tmp_path):
    """A list of runs, which would take twice as long; and the plan of a tiny model, which is the
    rehearsal of a submission."""
    Registry.open(f"sqlite:///{tmp_path}/registry.db").close()
    imported = list_imports("from rlx.cli import main; main(['runs'])", tmp_path)
    assert "rlx_registry.queries" in imported
    assert not {"pydantic", "rlx.spec", "numpy"} & imported
    run = "if __name__ == '__main__': main(['plan', 'experiments/quick.yaml'])"
    imported = list_imports(f"from rlx.cli import main\n{run}", tmp_path)
    assert "rlx.plan.rehearsal_checks" in imported
    assert not {"transformers", "fastapi", "sklearn"} & imported


RANK = """
import gc, os, sys
from rlx.importing import BESIDE, speed_up_imports

class Cycle:
    def __init__(self):
        self.own = self
    def __del__(self):
        os.write(1, b"collected")

with speed_up_imports():
    import rlx.run.loop
    Cycle()
import rlx.learner.learner
assert not {*BESIDE, "torch._inductor.compile_fx"} & sys.modules.keys(), sys.modules.keys()
assert gc.isenabled() and gc.get_freeze_count() > 100_000
import scipy, sklearn
sys.modules.setdefault("triton", None)  # whose library reports at exit what nobody has collected
"""


def test_a_rank_imports_nothing_for_others_and_hides_nothing_for_good():
    done = subprocess.run([sys.executable, "-c", RANK], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("collected") and "nanobind" not in done.stderr


def test_credit_is_assigned_by_one_function():
    """Training, the plan, the check of stored runs and rescoring put no equation together."""
    equations = {"place_row_rewards", "estimate_credit", "compute_token_weights"}
    users = {
        path.name
        for path in (ROOT / "platform").rglob("*.py")
        if equations & set(re.findall(r"\w+", path.read_text()))
    }
    assert users == {"step.py"}


def test_the_engine_names_no_task_environment_or_reward():
    """Only records of golden values, which are about what rlx ships, name Countdown's functions."""
    shipped = re.compile(r"(countdown|kg)(\.\w+)?|rlcr\.\w+")
    named = {
        f"{path.relative_to(ROOT)}: {node.value}"
        for path in (ROOT / "platform").rglob("*.py")
        if "golden" not in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and shipped.fullmatch(node.value)
    }
    assert named == set()
