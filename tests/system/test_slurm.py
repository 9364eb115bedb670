"""Runs as jobs of a real Slurm: whatever happens to a job, the registry says what is true."""

import os
import signal

import pytest
import slurm
from patience import LIMIT, signal_processes

from rlx.launch import is_job, reconcile_job
from rlx_registry import RegistryDatabaseError

TWO = {"runner.launcher": "{kind: slurm, nodes: 2}", "runner.ranks": 2}


@pytest.fixture(scope="module")
def cluster():
    with slurm.cluster() as running:
        yield running


@pytest.fixture(scope="module")
def there(cluster, own_home, tmp_path_factory):
    """A home whose path has a space in it, and in which Slurm is found."""
    made = type(own_home)(tmp_path_factory.mktemp("a home"))
    made.environment |= cluster.environment
    with pytest.MonkeyPatch.context() as own:
        own.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
        yield made
    signal_processes(made.processes(), signal.SIGKILL)


def status(home, run):
    return home.json("status", run)["status"]


def status_now(home, run):
    """What `rlx status` would say, which asks Slurm, without a process for each look."""
    with home.registry() as registry:
        return reconcile_job(registry, registry.run(run)).status


def submit(home, **sets):
    return home.submit("-d", sets={**home.brief, **TWO, **sets})


def job_of(home, run):
    given = [event.payload for event in home.events(run) if event.kind == "slurm"]
    return given[-1]["job"]


def test_to_the_end_while_others_wait(cluster, there):
    sets = {**there.brief, **there.held, **TWO}
    there.hold()  # until others wait
    following = there.begin("submit", there.yaml, sets=sets)

    def runs():
        assert following.poll() is None, following.communicate()
        made = (there.path / "runs" / "r-0001" / "job.json").exists()
        return made and status_now(there, "r-0001") == "running"

    there.until(runs, "it to run")
    waiting, cancelled = submit(there, seed=1), submit(there, seed=2)
    assert [status(there, run) for run in (waiting, cancelled)] == ["queued", "queued"]
    assert status(there, "1") == "running", "it holds both nodes"

    assert there.rlx("stop", waiting).returncode == 0
    cluster.call("scancel", job_of(there, cancelled))
    there.until(lambda: status_now(there, cancelled) == "stopped", "Slurm to be asked")
    assert there.run(waiting).status == "stopped"
    assert "was cancelled" in there.run(cancelled).reason
    assert cluster.job(job_of(there, waiting))["JobState"] == "CANCELLED"
    there.release()

    out, err = following.communicate(timeout=LIMIT)
    assert following.returncode == 0, err
    assert "accuracy" in out
    with there.registry() as registry:
        history = [(change.after, change.attempt) for change in registry.history("1")]
    assert history == [("queued", 0), ("running", 1), ("finished", 1)]
    there.until(lambda: not there.processes(), "every process to end")


def test_two_nodes_give_the_numbers_of_one_machine(cluster, there):
    there.until(cluster.idle, "both nodes")
    assert there.list_differences_to_one_machine(TWO["runner.launcher"]) == []


def test_taken_back_then_a_node_down_then_killed_then_cancelled(cluster, there):
    there.until(cluster.idle, "both nodes")
    run = submit(there, **{**there.long, "seed": 3})

    def trains(attempt):
        before = there.run(run)
        assert before.status in ("queued", "running"), before.reason
        return before.status == "running" and before.attempt == attempt and moved(before.step)

    def moved(step):
        return there.run(run).step > step

    there.until(lambda: trains(1), "it to train")
    cluster.call("scontrol", "requeue", job_of(there, run))
    there.until(lambda: status_now(there, run) == "queued", "it to wait again")
    assert "Slurm requeued job" in there.run(run).reason
    kept = there.run(run).step
    cluster.start_requeued_job(job_of(there, run))
    there.until(lambda: trains(2), "it to go on")
    assert there.run(run).step > kept

    cluster.lose_node("n2")
    there.until(lambda: status_now(there, run) == "queued", "the node to be missed")
    there.until(lambda: not there.processes(), "ranks on the lost node to leave")
    cluster.restart_node("n2", job_of(there, run))
    there.until(lambda: there.run(run).status == "running", "it to go on")
    third = there.run(run).attempt
    there.until(lambda: trains(third), "it to train")

    os.kill(there.run(run).pid, signal.SIGKILL)
    there.until(lambda: status(there, run) == "lost", "Slurm to be asked")
    assert "without recording a result" in there.run(run).reason
    there.until(lambda: not there.processes(), "every process to end")

    assert there.rlx("resume", run, "-dq").returncode == 0
    there.until(lambda: trains(third + 1), "it to go on")
    cluster.call("scancel", job_of(there, run))
    there.until(lambda: there.run(run).status == "stopped", "it to stop")
    assert "Slurm ended job" in there.run(run).reason
    there.until(lambda: not there.processes(), "every process to end")
    there.until(cluster.idle, "Slurm to be rid of it")


def test_a_group_is_a_job_per_run(cluster, there):
    """Slurm executes what fits; the command waits for all, and again submits what is missing."""
    there.until(cluster.idle, "both nodes")
    command = ("submit", there.yaml, "--seeds", "20..22", "--group", "fleet")
    sets = {**there.brief, **there.held, **TWO}
    there.hold()
    group = there.begin(*command, sets=sets)

    def runs():
        with there.registry() as registry:
            return sorted(registry.runs(group="fleet"), key=lambda run: run.seed)

    def have_jobs():
        assert group.poll() is None, group.communicate()
        try:
            found = runs() if (there.path / "registry.db").exists() else []
        except RegistryDatabaseError:  # it is just being made
            return False
        return len(found) == 3 and all(map(is_job, found))

    there.until(have_jobs, "three jobs")
    last = runs()[-1].id
    assert status_now(there, last) == "queued", "the first one holds both nodes"
    cluster.call("scancel", job_of(there, last))
    there.release()
    _, err = group.communicate(timeout=LIMIT)
    assert group.returncode == 1, err
    assert [run.status for run in runs()] == ["finished", "finished", "stopped"]
    assert "was cancelled" in there.run(last).reason
    assert "it is a job" not in err, "no worker is needed"

    again = there.rlx(*command, "--queue", sets=sets)
    assert again.returncode == 0, again.stderr
    assert [run.seed for run in runs()] == [20, 21, 22, 22], "nothing was begun twice"
    (new,) = {run.id for run in runs()} - {run.id for run in runs() if run.status != "queued"}
    assert there.rlx("stop", new).returncode == 0
    job = job_of(there, new)
    ended = ("CANCELLED", "FAILED")  # before or after its supervisor has begun
    there.until(lambda: cluster.job(job)["JobState"] in ended, "Slurm to end it")


def test_a_job_that_slurm_refuses(there):
    asked = {**TWO, "runner.launcher": "{kind: slurm, nodes: 2, options: {partition: none}}"}
    done = there.rlx("submit", there.yaml, sets={**there.brief, **asked, "seed": 4})
    assert done.returncode == 4
    assert "sbatch rejected" in done.stderr
    assert "partition" in done.stderr
    assert status(there, "latest") == "failed"
