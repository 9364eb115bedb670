"""A run whose engine is chosen when it is submitted: it has the engine, and says why."""

import json

REASON = "transformers, because the run is on the CPU"


def test_a_run_has_the_engine_that_was_chosen_and_says_why(own_home):
    home = own_home
    sets = {**home.brief, **home.unhurried, "phases.0.steps": 40, "sampler.engine": "auto"}
    started = home.rlx("submit", home.yaml, "-d", sets=sets)
    assert started.returncode == 0, started.stderr
    assert f"  sampler {REASON}\n" in started.stdout
    home.stop("r-0001", after=2)
    assert home.run("r-0001").status == "stopped"
    assert f"chosen   sampler: {REASON}\n" in home.rlx("status", "r-0001").stdout
    resumed = home.rlx("resume", "r-0001")
    assert resumed.returncode == 0, resumed.stderr
    assert f"chosen    sampler: {REASON}\n" in resumed.stdout
    run = home.run("r-0001")
    assert (run.status, run.step) == ("finished", 42)
    assert run.spec["sampler"] == {"engine": "transformers", "max_rows": 512}
    stored = json.loads((home.path / "runs" / "r-0001" / "spec.json").read_text())
    assert stored["sampler"] == run.spec["sampler"]
    assert run.origins["sampler.engine"] == "--set (auto)"
    with home.registry() as registry:
        events = registry.results.events("r-0001")
    assert [e.message for e in events if e.kind == "choice"] == [f"sampler: {REASON}"]
    again = home.rlx("submit", home.yaml, sets={**sets, "sampler.engine": "transformers"})
    assert "nothing to do" in again.stdout and "as r-0001" in again.stdout
    rescored = home.json("rescore", "r-0001")
    assert rescored["same"] and rescored["steps"][-1] == 42
