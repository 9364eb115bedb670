"""Promises about the shape of the repository, kept by the machine."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest

from rlx.home import DEFAULT_REGISTRY
from rlx.spec import TrackingSpec
from rlx_registry import Registry

ROOT = Path(__file__).parents[2]

# room -> rooms it may import, besides the leaves. Anything not listed is an error, not a habit.
LEAVES = {
    *("descendants", "errors", "importing", "out_of_memory", "ray_client", "repeatable"),
    *("reporting", "seeding", "sources", "stopwatch", "text"),
}
MAY_IMPORT = {
    "plugin": set(),
    "spec": {"plugin"},
    "discovery": {"spec", "plugin", "rlx_registry"},
    "rollout": {"spec", "plugin", "discovery"},
    "reward": {"spec", "plugin", "discovery", "rollout"},
    "batch": {"rollout", "reward"},
    "mask": {"batch", "spec"},
    "credit": {"spec", "plugin", "discovery", "rlx_registry"},
    "kl": {"spec"},
    "loss": {"spec"},
    "train_batch": {"batch", "credit", "discovery", "loss", "plugin", "spec"},
    "assignment": {"batch", "credit", "kl", "loss", "spec", "train_batch"},
    "recipe": {"spec", "plugin", "discovery", "rollout", "reward", "batch", "train_batch"},
    "row_rewards": {"batch", "recipe", "reward", "rollout", "train_batch"},
    "step_actors": {"reward", "rollout", "train_batch"},
    "step": {"assignment", "recipe", "row_rewards", "step_actors", "train_batch"},
    "home": {"rlx_registry"},
    "writing": set(),
    "sealing": {"home", "rlx_registry"},
    "model": {"spec", "plugin", "discovery", "rollout", "sealing"},
    "sampler": {"spec", "discovery", "rollout", "model"},
    "learner": {"spec", "batch", "kl", "loss", "model", "train_batch"},
    "evaluation": {"spec", "plugin", "rollout", "reward", "sampler"},
    "probe": {"spec", "plugin", "rollout", "reward", "sampler", "evaluation"},
    "record": {"spec", "plugin", "rollout", "reward", "probe", "rlx_registry"},
    "trial": {
        *("spec", "plugin", "discovery", "rollout", "reward", "batch", "credit", "step"),
        *("train_batch", "row_rewards", "recipe", "model", "rlx_registry"),
    },
    "checkpoint": {"spec", "home", "sealing", "model", "learner", "rlx_registry"},
    "run": {
        *("spec", "plugin", "rollout", "reward", "batch", "credit", "kl", "loss", "step"),
        *(
            "train_batch",
            "assignment",
            "row_rewards",
            "recipe",
            "home",
            "model",
            "sampler",
            "learner",
            "evaluation",
            "probe",
        ),
        *("record", "checkpoint", "sealing", "discovery", "rlx_registry"),
    },
    "audit": {
        *("spec", "plugin", "discovery", "rollout", "reward", "batch", "credit", "step"),
        *("row_rewards", "recipe", "home", "model", "sampler", "evaluation", "probe", "record"),
        *("train_batch", "run", "sealing", "rlx_registry"),
    },
    "launch": {
        *("spec", "plugin", "discovery", "home", "model", "learner", "record", "checkpoint"),
        *("run", "audit", "reward", "sampler", "sealing", "rlx_registry"),
    },
    "checks": {
        *("spec", "plugin", "discovery", "rollout", "reward", "batch", "train_batch", "trial"),
        *("home", "model", "launch", "rlx_registry"),
    },
    "plan": {
        *("spec", "discovery", "rollout", "reward", "batch", "credit", "row_rewards", "recipe"),
        *("model", "trial", "checks", "rlx_registry"),
    },
    "comparison": {"checks", "evaluation", "launch", "rlx_registry", "spec"},
    "assess": {
        *("audit", "checkpoint", "checks", "discovery", "evaluation", "home", "launch", "model"),
        *("plan", "plugin", "probe", "record", "rlx_registry", "run", "spec", "writing"),
    },
    "api": {
        *("assess", "checks", "comparison", "discovery", "launch", "plan", "reward"),
        *("rlx_registry", "spec"),
    },
    "testing": {
        *("plugin", "spec", "discovery", "rollout", "reward", "batch", "mask", "credit"),
        *(
            "kl",
            "loss",
            "evaluation",
            "probe",
            "rlx_plugins",
            "rlx_registry",
        ),  # the golden runner computes with all of them
    },
}

MAY_IMPORT["cli"] = {*MAY_IMPORT, "rlx_registry", "rlx_web"}

OWN = {"rlx_registry", "rlx_web", "rlx_plugins", "rlx_gyms"}
TOP_LEVEL = {
    "pyproject.toml",
    "README.md",
    "platform",
    "plugins",
    "experiments",
    "registry",
    "tests",
    "web",
    "Makefile",
    "LICENSE",
    "CHANGELOG.md",
    "docs",
}
HEAVY = {"torch", "transformers", "vllm", "deepspeed", "mlflow", "pandas"}


def imports(paths) -> set[str]:
    """Rooms of rlx, and packages of ours, that a set of files imports anywhere."""
    names = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                if node.module == "rlx":
                    names |= {alias.name for alias in node.names}
                else:
                    names.add(node.module.removeprefix("rlx.").split(".")[0])
            elif isinstance(node, ast.Import):
                names |= {a.name.removeprefix("rlx.").split(".")[0] for a in node.names}
    rooms = {*MAY_IMPORT, *LEAVES}
    return {name for name in names if name in rooms | OWN}


def files(room: str) -> list[Path]:
    base = ROOT / "platform" / "rlx" / room
    alone = base.with_suffix(".py")
    return [alone] if alone.exists() else sorted(base.rglob("*.py"))


@pytest.mark.parametrize("room", sorted(MAY_IMPORT))
def test_imports_flow_one_way(room):
    assert imports(files(room)) - {room} <= MAY_IMPORT[room] | LEAVES


def test_the_import_table_of_the_docs_is_this_one():
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|$", text, re.MULTILINE)
    table = {room: set(re.findall(r"`(\w+)`", names)) for room, names in rows}
    table["cli"] |= MAY_IMPORT["cli"]  # written there as "every room"
    assert table == MAY_IMPORT


@pytest.mark.parametrize("leaf", sorted(LEAVES))
def test_leaves_import_nothing_of_ours(leaf):
    assert imports(files(leaf)) == set()


def test_every_room_is_listed():
    entries = (ROOT / "platform" / "rlx").iterdir()
    rooms = {p.stem for p in entries if p.suffix == ".py" or (p.is_dir() and list(p.rglob("*.py")))}
    assert rooms - {"__init__", "__pycache__"} == {*MAY_IMPORT, *LEAVES}


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("registry/rlx_registry", {"rlx_registry"}),
        ("web/rlx_web", {"rlx_web", "rlx_registry"}),
        ("plugins/rlx_plugins", {"rlx_plugins", "plugin"}),
        ("plugins/rlx_gyms", {"rlx_gyms", "plugin"}),
    ],
)
def test_the_other_packages_keep_to_themselves(package, allowed):
    assert imports((ROOT / package).rglob("*.py")) <= allowed


def test_platform_does_not_shadow_the_standard_library():
    for root in ("platform", "plugins", "registry", "web"):
        assert not list((ROOT / root).glob("*.py"))
    assert not list((ROOT / "tests").rglob("__init__.py"))
    code = "import platform; print(platform.python_version())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert re.fullmatch(r"3\.\d+\.\d+\S*\n", done.stdout)


def test_nothing_else_at_the_top():
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    tops = {line.split("/")[0] for line in done.stdout.splitlines()}
    assert {top for top in tops if not top.startswith(".")} <= TOP_LEVEL


def test_one_distribution_offers_everything():
    groups = {e.group for e in distribution("rlx").entry_points}
    assert {"rlx.tasks", "rlx.rewards", "rlx.estimators", "rlx.masks"} <= groups
    plugins = ("plugins/rlx_plugins", "plugins/rlx_gyms")
    for package in ("platform/rlx", "registry/rlx_registry", "web/rlx_web", *plugins):
        assert (ROOT / package / "py.typed").exists()


@pytest.mark.parametrize(
    "code",
    [
        "from rlx.cli import main; main(['--help'])",
        "from rlx.cli import main; main(['validate', 'experiments/rlcr.yaml'])",
        "from pathlib import Path; import rlx.checks as checks; checks.run_preflight_checks("
        "*checks.check_file(Path('experiments/rlcr_1.5b.yaml')), elsewhere=True)",
        "import rlx; rlx.Run; rlx.score; rlx.EvaluationRequest",
        "import rlx; rlx.read('experiments/rlcr.yaml')",
        "import rlx_registry",
        "import rlx_web",
        "import rlx_plugins.countdown, rlx_plugins.rlcr, rlx_gyms.reasoning",
        "import rlx.spec.estimator, rlx.spec.mask, rlx.discovery",
    ],
)
def test_what_must_start_fast_imports_nothing_heavy(code, tmp_path):
    probe = f"{code}\nimport sys; print(*sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", probe],
        cwd=ROOT,
        env=os.environ | {"RLX_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert not HEAVY & set(done.stderr.split())


def test_a_list_of_runs_does_not_import_what_describes_experiments(tmp_path):
    """Half of the time that listing a thousand runs would take."""
    url = f"sqlite:///{tmp_path}/registry.db"
    Registry.open(url).close()
    probe = "import sys; from rlx.cli import main; main(['runs']); print(*sys.modules)"
    environment = os.environ | {"RLX_HOME": str(tmp_path)}
    command = [sys.executable, "-c", probe]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "rlx_registry.run_lists" in done.stdout.split()
    assert not {"pydantic", "rlx.spec", "numpy"} & set(done.stdout.split())
    assert TrackingSpec().registry == DEFAULT_REGISTRY


RANK = """
import gc, sys
from rlx.importing import BESIDE, speed_up_imports
with speed_up_imports():
    import rlx.run.loop
import rlx.learner.engine
assert not {*BESIDE, "torch._inductor.compile_fx"} & sys.modules.keys(), sys.modules.keys()
assert gc.isenabled() and gc.get_freeze_count() > 100_000
import scipy, sklearn
"""


def test_a_rank_imports_nothing_for_others_and_hides_nothing_for_good():
    done = subprocess.run([sys.executable, "-c", RANK], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def written() -> Iterator[Path]:
    """Every source file that people edit."""
    for root in ("platform", "plugins", "registry", "web"):
        for path in sorted((ROOT / root).rglob("*.py")):
            if "migrations" not in path.parts:  # generated once, never edited
                yield path


def test_no_function_is_a_page_long():
    pages = [
        f"{path.relative_to(ROOT)}:{node.name}"
        for path in written()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 80
    ]
    assert pages == []


def test_no_file_is_a_chapter_long():
    lengths = {path.relative_to(ROOT): len(path.read_text().splitlines()) for path in written()}
    assert {path: length for path, length in lengths.items() if length > 800} == {}


def test_the_step_fits_on_one_page():
    page = (ROOT / "platform/rlx/step.py").read_text()
    assert len(page.splitlines()) <= 80
    names = ("sample_and_score", "scored_rows", "compute_streams", "assign_credit", "update_models")
    told = [page.index(name, page.index("def run_step")) for name in names]
    assert told == sorted(told)
    assert told[-1] < page.index("def assign_credit")


def test_credit_is_assigned_by_one_function():
    """Training, the plan, the check of stored runs and rescoring put no equation together."""
    equations = {"place_row_rewards", "estimate_credit", "compute_token_weights"}
    users = {
        path.name
        for path in (ROOT / "platform").rglob("*.py")
        if equations & set(re.findall(r"\w+", path.read_text()))
    }
    assert users == {"assignment.py", "step.py"}


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
