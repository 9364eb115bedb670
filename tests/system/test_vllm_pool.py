"""Runs with a pool of vLLM servers: two ranks share two servers, one of which is killed while it is
asked; and a pool of one server, beside the same run with a worker beside its rank.
"""

import json
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from engines import needs_vllm
from patience import wait_until

pytestmark = [needs_vllm]

QUICK = Path(__file__).parents[2] / "experiments" / "quick.yaml"
BRIEF = {
    "phases.0.steps": 1,
    "phases.1.steps": 1,
    "evaluation.problems": 4,
    "tracking.mlflow": "null",
    "tracking.pictures": "false",
    "runner.max_attempts": 1,
}
LONGER = {**BRIEF, "phases.1.steps": 5, "runner.ranks": 2, "name": "pool-of-two"}
POOL = "{{engine: vllm, kv_cache_mb: 32, pool: {{servers: {}}}}}"
DRIFT = 5e-5
"""Nats between vLLM and the learner in float32, at most; docs/sampling.md states 3e-5 at most as
observed, and a tolerance of .001."""


def servers(home):
    """Process ids of servers, by number."""
    found = {}
    for pid in home.processes():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:
            continue
        if named := re.search(r"vllm_worker.*/s(\d+)\0", command, re.DOTALL):
            found[int(named[1])] = pid
    return found


def submitted(home, sampler, sets):
    done = home.rlx("submit", QUICK, "-qd", sets={**sets, "sampler": sampler})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def is_generating(home, run_id):
    try:
        shown = (home.path / "runs" / run_id / "progress.json").read_text()
        return json.loads(shown)["doing"] == "generation"
    except (OSError, ValueError):
        return False


def is_caught(home, run_id, server):
    """Stops a server while the run generates, which it cannot end without the server."""
    os.kill(server, signal.SIGSTOP)
    if is_generating(home, run_id):
        return True
    os.kill(server, signal.SIGCONT)
    return False


def metrics(home, run_id):
    """All metrics of a run's steps but those of time and memory."""
    with home.registry() as registry:
        found = registry.results.metrics(run_id)
    return {k: v for k, v in found.items() if not k.startswith(("perf/", "time/"))}


def ended(home, run_id):
    wait_until("the run to end", lambda: home.run(run_id).ended)
    run = home.run(run_id)
    assert run.status == "finished", run.reason
    return SimpleNamespace(
        run=run,
        log=(Path(run.directory) / "run.log").read_text(),
        metrics=metrics(home, run_id),
        bodies=[trees for _, trees, _ in home.bodies(run)],
    )


@pytest.fixture(scope="module")
def killed(own_home):
    """The run of two ranks, whose second server was killed while the run waited for it."""
    run_id = submitted(own_home, POOL.format(2), LONGER)
    wait_until("both servers", lambda: set(servers(own_home)) == {0, 1})
    wait_until("a step", lambda: own_home.run(run_id).step >= 1)
    before = servers(own_home)
    wait_until("a generation", lambda: is_caught(own_home, run_id, before[1]))
    os.kill(before[1], signal.SIGKILL)
    wait_until("another in its place", lambda: servers(own_home).get(1) not in (None, before[1]))
    assert servers(own_home)[0] == before[0]
    found = ended(own_home, run_id)
    wait_until("every process to end", lambda: not own_home.processes())
    return found


def test_a_run_survives_the_end_of_a_server(killed):
    assert killed.run.step == 6
    assert re.search(r"vLLM server 1 has not answered \d+ rows: they are asked again", killed.log)
    assert re.search(r"vLLM server 1, process \d+, was ended by SIGKILL", killed.log)
    assert killed.metrics["sampler/restarts"][-1][1] == 1
    assert "vLLM in a pool of 2 servers" in killed.log


def test_both_servers_serve_and_their_numbers_are_the_learners(killed):
    (counts,) = re.findall(r"rows by vLLM server, of this rank: (.*)", killed.log)
    one, other = (int(count.replace(",", "")) for count in counts.split(", "))
    assert min(one, other) > 0.8 * max(one, other) > 50
    drift = [value for _, value in killed.metrics["sampler/drift"]]
    assert len(drift) == 6
    assert 0 < max(drift) <= DRIFT


def test_its_end_is_an_event(own_home, killed):
    with own_home.registry() as registry:
        events = registry.results.events(killed.run.id)
    (event,) = [event for event in events if event.kind == "sampler_restarted"]
    assert event.level == "warning"
    assert re.fullmatch(
        r"a process of the sampler was started again once by step \d, see the log", event.message
    )


def test_a_pool_of_one_is_the_worker_beside_the_learner(own_home, killed):
    samplers = {"pool": POOL.format(1), "beside": "{engine: vllm, kv_cache_mb: 32}"}
    runs = {
        name: submitted(own_home, sampler, {**BRIEF, "name": name})
        for name, sampler in samplers.items()
    }
    pool, beside = (ended(own_home, run_id) for run_id in runs.values())
    assert len(pool.metrics) > 30
    assert pool.metrics == beside.metrics
    assert pool.bodies == beside.bodies
    assert sum(map(len, pool.bodies)) == 8
