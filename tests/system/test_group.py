"""A group of runs that is killed half-way, and called again."""

import signal

from patience import signal_processes

GROUP = ("--seeds", "0..1", "--grid", "estimator.confidence.normalize=center,std")


def test_what_is_missing_is_finished(own_home):
    home = own_home
    sets = {**home.brief, **home.held}

    def states():
        with home.registry() as registry:
            return {run.id: (run.status, run.attempt) for run in registry.runs()}

    group = home.begin("submit", home.yaml, *GROUP, sets=sets)
    home.until((home.path / "runs" / "r-0004").exists, "the group to be recorded")
    home.until(lambda: states().get("r-0001", ("",))[0] == "finished", "the first run to finish")
    home.hold()
    home.until(lambda: states()["r-0002"][0] == "running", "the second one to run")
    home.freeze(*(pids := home.processes()))  # or one would start what another's death leaves
    signal_processes(pids, signal.SIGKILL)
    group.communicate()
    home.until(lambda: not home.processes(), "every process to end")
    home.release()
    assert [status for status, _ in states().values()].count("finished") == 1

    done = home.rlx("submit", home.yaml, *GROUP, sets=sets)
    assert done.returncode == 0, done.stderr
    found = states()
    assert sorted(found) == ["r-0001", "r-0002", "r-0003", "r-0004"], "nothing was begun twice"
    assert {status for status, _ in found.values()} == {"finished"}
    assert [found[run][1] for run in sorted(found)] == [1, 2, 1, 1], "attempts"
    assert done.stdout.splitlines()[-1] == "compare them:  rlx compare rlcr-normalize"

    compared = home.rlx("compare", "rlcr-normalize", "--md")
    assert compared.returncode == 0, compared.stderr
    assert "| estimator.confidence.normalize | center | std |" in compared.stdout
    assert "**After training: held_out**" in compared.stdout
