"""The whole job with vLLM, without a C++ compiler, and with its worker killed on the way.

That a worker which is started again draws the very tokens that the killed one would have drawn is
shown in tests/system/sampler/test_vllm.py.
"""

import os
import signal
from pathlib import Path

from engines import needs_vllm
from patience import wait_until

pytestmark = [needs_vllm]

QUICK = Path(__file__).parents[2] / "experiments" / "quick.yaml"
SETS = {
    "sampler": "{engine: vllm, kv_cache_mb: 32}",
    "phases.0.steps": 2,
    "phases.1.steps": 6,
    "evaluation.problems": 8,
    "tracking.mlflow": "null",
    "runner.max_attempts": 1,
}


def test_every_step_is_taken_and_the_sampler_stays_the_learner(own_home):
    own_home.environment["CXX"] = "/nowhere/c++"
    run_id = own_home.submit("-d", yaml=QUICK, sets={**SETS, **own_home.held})
    (worker,) = wait_until("its worker", lambda: own_home.find("vllm_process"))
    wait_until("a step", lambda: own_home.run(run_id).step >= 1)
    own_home.hold()  # or the run could be over
    os.kill(worker, signal.SIGKILL)
    own_home.release()
    wait_until("the run to end", lambda: own_home.run(run_id).ended)
    wait_until("every process to end", lambda: not own_home.processes())
    run = own_home.run(run_id)
    assert (run.status, run.step) == ("finished", 8), run.reason
    names = ["sampler/drift", "sampler/restarts"]
    with own_home.registry() as registry:
        found = registry.results.metrics(run_id, names)
    drift, restarts = ([value for _, value in found[name]] for name in names)
    assert len(drift) == 8
    assert max(drift) <= 5e-5
    assert (restarts[0], restarts[-1]) == (0, 1)
    drawn = [
        segment
        for _, trees, _ in own_home.bodies(run)
        for tree in trees
        for segment in tree["segments"]
        if segment["author"] == "policy"
    ]
    assert len(drawn) > 100
