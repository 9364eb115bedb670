"""A run whose pool of two servers repeats to the last bit: killed and resumed, probed while it
trains and afterwards, and evaluated at a checkpoint, beside the same run with nothing killed, and
beside vLLM without a pool.
"""

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from engines import needs_vllm
from patience import wait_until

from rlx_registry import read_body

pytestmark = [needs_vllm]

QUICK = Path(__file__).parents[2] / "experiments" / "quick.yaml"
STEPS = 6
SETS = {
    "sampler": "{engine: vllm, kv_cache_mb: 32, pool: {servers: 2, repeatable: true}}",
    "phases.0.steps": 1,
    "phases.1.steps": STEPS - 1,
    "runner.checkpoint": "{every: 1, keep: 9}",
    "evaluation.problems": 6,
    "tracking.mlflow": "null",
    "tracking.pictures": "false",
    "probe": "{every: 3, problems: 4, samples: 2, max_new_tokens: 12, schemes: [early_answering]}",
}
AT = 3


def submit(home, name):
    done = home.rlx("submit", QUICK, "-qd", sets={**SETS, "name": name})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def read_records(home, run_id):
    """What a run has recorded, but for times."""
    wait_until("the run to end", lambda: home.run(run_id).ended)
    run = home.run(run_id)
    assert (run.status, run.step) == ("finished", STEPS), run.reason
    with home.registry() as registry:
        metrics = registry.results.metrics(run_id)
        probes = registry.results.evaluations(run_id, "probe/")
        events = registry.results.events(run_id)
    bodies = {
        (e.step, e.label): read_body(
            Path(run.directory) / e.payload["body"]["path"], e.payload["body"]["sha256"]
        ).to_pylist()
        for e in probes
    }
    timed = ("perf/", "time/")
    return SimpleNamespace(
        run=run,
        metrics={k: v for k, v in metrics.items() if not k.startswith(timed)},
        rollouts=[trees for _, trees, _ in home.bodies(run)],
        probes=bodies,
        events=[event.kind for event in events],
        log=(Path(run.directory) / "run.log").read_text(),
    )


@pytest.fixture(scope="module")
def runs(own_home):
    """The run that is killed after a few steps, and the one that is not."""
    killed = submit(own_home, "killed")
    ranks = own_home.await_ranks(killed)
    wait_until("some steps", lambda: own_home.run(killed).step >= AT - 1)
    for rank in ranks:
        os.kill(rank, signal.SIGKILL)
    found = {"killed": read_records(own_home, killed)}
    found["unbroken"] = read_records(own_home, submit(own_home, "unbroken"))
    wait_until("every process to end", lambda: not own_home.processes())
    return found


def test_a_killed_run_goes_on_and_has_the_same_numbers_to_the_last_bit(runs):
    killed, unbroken = runs["killed"], runs["unbroken"]
    assert "resumed" in killed.events
    assert killed.log.count("rows by vLLM server, of this rank") == 1, (
        "the first attempt was killed"
    )
    assert killed.metrics == unbroken.metrics
    assert killed.rollouts == unbroken.rollouts
    assert sum(map(len, killed.rollouts)) == 4 * STEPS


def test_its_probes_while_it_trains_are_the_same_too(runs):
    killed, unbroken = runs["killed"], runs["unbroken"]
    expected = [(0, "before"), (3, "step"), (STEPS, "after")]
    assert sorted(killed.probes) == expected
    assert killed.probes == unbroken.probes
    assert all(killed.probes.values())


def test_a_probe_of_the_model_answers_as_the_run_did(own_home, runs, tmp_path):
    run, samples = runs["unbroken"].run, tmp_path / "samples.parquet"
    done = own_home.rlx("probe", run.id, "--no-record", "--json", "--out", samples)
    assert done.returncode == 0, done.stderr
    assert "rows by vLLM server" in done.stderr
    assert json.loads(done.stdout)["step"] == STEPS, "what servers say does not get in between"
    probed = read_body(samples).to_pylist()
    recorded = runs["unbroken"].probes[STEPS, "after"]
    keys = ("problem_id", "seed", "token_ids", "whole_text", "confidences")
    assert [[row[key] for key in keys] for row in probed] == [
        [row[key] for key in keys] for row in recorded
    ]


def test_an_evaluation_at_a_checkpoint_is_that_of_vllm_beside_the_rank(own_home, runs, tmp_path):
    run = runs["unbroken"].run

    def evaluate(name, *overrides):
        out = tmp_path / f"{name}.jsonl"
        done = own_home.rlx(
            *("eval", run.id, "--at", str(AT), "--problems", "6", "--json", "--no-record"),
            *("--out", out, *overrides),
        )
        assert done.returncode == 0, done.stderr
        answers = [json.loads(line) for line in out.read_text().splitlines()]
        return answers, json.loads(done.stdout), "rows by vLLM server" in done.stderr

    pool = evaluate("pool")
    beside = evaluate("beside", "--set", "sampler.pool=null")
    assert (pool[2], beside[2]) == (True, False)
    assert len(pool[0]) == 6
    assert pool[0] == beside[0]
