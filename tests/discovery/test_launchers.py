"""A launcher of another distribution, named in YAML with its own settings."""

import sys
from pathlib import Path

import pytest
from guests import installed

from rlx.cli import main
from rlx.errors import EnvironmentFault, PluginError
from rlx.home import RunFolder
from rlx.launch import JobLauncher, build_device_request, open_launcher
from rlx.launch.launcher import find_job_launcher
from rlx.plan import check_file, run_preflight_checks
from rlx.spec.reading.diagnostics import InvalidSpec
from rlx_registry import Registry

QUICK = Path(__file__).parents[2] / "experiments" / "quick.yaml"
SETTINGS = '''
from typing import ClassVar, Literal
from pydantic import Field
from rlx.plugin import LauncherPlugin

class Wrapped(LauncherPlugin):
    """Runs the ranks below another command."""
    implementation: ClassVar[str] = "page_wrap_code:WrappedLauncher"
    kind: Literal["wrapped"] = "wrapped"
    command: tuple[str, ...] = ("env",)
    """The command."""

    def check_ranks(self, ranks):
        if ranks > 2:
            raise ValueError("launcher wrapped starts at most two ranks")

class Batch(LauncherPlugin):
    """Runs as jobs of a folder in which files are jobs."""
    implementation: ClassVar[str] = "page_wrap_code:BatchLauncher"
    submits_jobs: ClassVar[bool] = True
    kind: Literal["batch"] = "batch"
    folder: str = Field(min_length=1)
'''
CODE = """
from pathlib import Path
from rlx.errors import EnvironmentFault
from rlx.launch import JobLauncher, Launcher, build_torchrun_command
from rlx.spec.reading import build_error

class WrappedLauncher(Launcher):
    def check(self):
        if self.runner.launcher.command[0] == "nothing":
            yield build_error(("runner", "launcher", "command"), "there is no 'nothing' here")
    def build_command(self, folder, run_id):
        own = build_torchrun_command(["--standalone"], self.runner.ranks, folder.root, run_id)
        return [*self.runner.launcher.command, *own]

class BatchLauncher(JobLauncher):
    title = "Batch"
    @property
    def folder(self):
        return Path(self.runner.launcher.folder)
    def build_command(self, folder, run_id):
        return build_torchrun_command(["--standalone"], self.runner.ranks, folder.root, run_id)
    def submit(self, spec, folder, run_id, script, environment):
        if not self.folder.is_dir():
            raise EnvironmentFault(f"no {self.folder} takes {run_id}")
        (self.folder / run_id).write_text(script.read_text())
        return run_id
    def cancel(self, job):
        (self.folder / job).write_text("cancelled")
    def find_status(self, job, status):
        if status == "queued" and (self.folder / job).read_text() == "broken":
            return "failed", f"job {job} is broken"
        return None
    def find_stop_status(self):
        return "stopped", "the job ended"
"""
POINTS = """[rlx.launchers]
wrapped = page_wrap:Wrapped
batch = page_wrap:Batch
"""


@pytest.fixture(autouse=True)
def guest(tmp_path, monkeypatch):
    monkeypatch.setenv("RLX_HOME", str(tmp_path / "home"))
    modules = {"page_wrap": SETTINGS, "page_wrap_code": CODE}
    with installed(tmp_path, monkeypatch, "rlx-wrap", POINTS, **modules):
        yield


def read(launcher, *more):
    return check_file(QUICK, [f"runner.launcher={launcher}", *more])


def test_yaml_names_it_and_the_experiment_stays_the_same():
    spec = read("{kind: wrapped, command: [nice, -n5]}")[0].spec
    given = {"kind": "wrapped", "command": ["nice", "-n5"]}
    assert spec.dump_resolved()["runner"]["launcher"] == given
    assert spec.digest == read("local")[0].spec.digest
    assert read("wrapped")[0].spec.runner.launcher.command == ("env",)
    assert "page_wrap_code" not in sys.modules


def test_its_class_checks_places_and_starts_the_ranks(tmp_path):
    loaded, plugins = read("{kind: wrapped, command: [nice]}", "runner.ranks=2")
    launcher = open_launcher(loaded.spec.runner)
    command = launcher.build_command(RunFolder(tmp_path), "r-1")
    assert command[0] == "nice" and command[-2:] == [str(tmp_path), "r-1"]
    assert launcher.count_ranks_here() == 2
    with pytest.raises(InvalidSpec, match="launcher wrapped starts at most two ranks"):
        read("wrapped", "runner.ranks=3")
    loaded, plugins = read("{kind: wrapped, command: [nothing]}")
    with pytest.raises(InvalidSpec, match="there is no 'nothing' here"):
        run_preflight_checks(loaded, plugins, elsewhere=False)


def test_a_job_system_takes_watches_and_cancels_its_runs(tmp_path, capsys):
    jobs = tmp_path / "jobs"
    sets = [f"--set=runner.launcher={{kind: batch, folder: {jobs}}}"]
    assert main(["submit", str(QUICK), "--detach", "-q", *sets]) == 4
    assert "takes r-0001" in capsys.readouterr().err
    jobs.mkdir()
    assert main(["submit", str(QUICK), "--detach", "-q", *sets]) == 0
    run = capsys.readouterr().out.strip()
    assert "rlx.launch.supervisor" in (jobs / run).read_text()
    with Registry.open(f"sqlite:///{tmp_path}/home/registry.db") as registry:
        [event] = [e for e in registry.results.events(run) if e.kind == "batch"]
        assert event.message == f"submitted to Batch as job {run}"
        assert registry.run(run).status == "queued"
    assert main(["stop", run]) == 0
    assert (jobs / run).read_text() == "cancelled"
    assert main(["submit", str(QUICK), "--detach", "-q", "--again", *sets]) == 0
    other = capsys.readouterr().out.strip().splitlines()[-1]
    (jobs / other).write_text("broken")
    assert main(["status", other]) == 0
    assert f"job {other} is broken" in capsys.readouterr().out


def test_a_launcher_that_submits_jobs_and_has_no_job_system_is_named(tmp_path):
    runner = read("{kind: batch, folder: jobs}")[0].spec.runner
    assert isinstance(find_job_launcher(runner), JobLauncher)
    assert find_job_launcher(read("wrapped")[0].spec.runner) is None
    sys.modules.pop("page_wrap_code")
    (tmp_path / "page_wrap_code.py").write_text(
        CODE.replace("BatchLauncher(JobLauncher)", "BatchLauncher(Launcher)")
    )
    with pytest.raises(PluginError, match=r"'batch' submits jobs, and its .* is no .*JobLauncher"):
        find_job_launcher(runner)


def test_too_few_devices_are_refused(monkeypatch):
    spec = read("local", "runner.ranks=2")[0].spec
    monkeypatch.setenv("RLX_DEVICES", "cpu:0,cpu:1")
    assert build_device_request(spec).count == 2
    monkeypatch.setenv("RLX_DEVICES", "cpu:0")
    assert build_device_request(read("{kind: batch, folder: jobs}")[0].spec) is None
    with pytest.raises(EnvironmentFault, match="has 2 ranks, each with a device of its own"):
        build_device_request(spec)
