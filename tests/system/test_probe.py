"""Probes of a run, and of the model that it has exported."""

import json
from pathlib import Path

import pytest
import torch
from patience import LIMIT
from run_homes import TINY

from rlx.model import build_policy
from rlx.phase_setup import build_setup
from rlx.reward import RewardPool
from rlx.run.probes import build_probe_context, probe_problems
from rlx.run.training import build_prompt_fit
from rlx.sampler import TransformersSampler
from rlx.spec import ExperimentSpec, PretrainedModelSpec
from rlx_registry import read_body

PROBLEMS, SAMPLES = 12, 6
SMALL = {
    **TINY,
    "model.layers": 2,
    "model.intermediate_size": 64,
    "model.warm_start.steps": 150,
    "task.numbers": "{2: 1.0}",
    "task.number_range": "[1, 4]",
    "task.target_range": "[1, 8]",
    "task.operators": "+",
    "phases.0.steps": 1,
    "phases.1.steps": 1,
    "rollout.num_generations_answer": 4,
    "rollout.num_generations_confidence": 3,
    "evaluation.problems": 8,
    "tracking.mlflow": "null",
    "probe": f"{{every: 2, problems: {PROBLEMS}, samples: {SAMPLES}, max_new_tokens: 12, "
    "schemes: [early_answering, mistake]}",
}
OTHER = ("--scheme", "filler", "--samples", "2", "--problems", "4")


class Probed:
    """A run with probes, and what `rlx eval --probe` then said."""

    def __init__(self, home):
        self.home = home
        self.submitted = home.rlx("submit", home.yaml, sets=SMALL)
        assert self.submitted.returncode == 0, self.submitted.stderr
        self.record = home.run("r-0001")
        self.root = Path(self.record.directory)
        self.evaluations = self.stored()
        model, spec = self.root / "model", self.root / "spec.json"
        same = home.begin("eval", "--probe", "r-0001", "--json")
        alone = home.begin("eval", "--probe", model, "--spec", spec, "--json")
        self.same, self.alone = (ended(process) for process in (same, alone))
        files = ("--out", home.folder / "samples.parquet", "--pictures", home.folder / "p")
        other = home.begin("eval", "--probe", "latest", *OTHER, *files)
        unwritable = home.begin(
            "eval", "--probe", "1", "--scheme", "filler", "--set", "probe.filler=ß"
        )
        self.other, self.unwritable = (ended(process) for process in (other, unwritable))

    def stored(self):
        with self.home.registry() as registry:
            return registry.results.evaluations("r-0001", "probe/")


def ended(process):
    out, err = process.communicate(timeout=LIMIT)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def probed(own_home):
    return Probed(own_home)


def at(evaluations, label):
    return {e.suite: e for e in evaluations if e.label == label}


def test_a_run_records_every_scheme_before_and_after(probed):
    assert {(e.step, e.label, e.suite) for e in probed.evaluations} == {
        (step, label, f"probe/{scheme}")
        for step, label in ((0, "before"), (2, "after"))
        for scheme in ("early_answering", "mistake")
    }
    for e in probed.evaluations:
        assert 0 < e.n <= PROBLEMS
        body = e.payload["body"]
        rows = read_body(probed.root / body["path"], body["sha256"]).to_pylist()
        mine = [row for row in rows if f"probe/{row['scheme']}" == e.suite]
        assert e.metrics["samples"] == sum(row["correct"] is not None for row in mine)
        assert len({row["problem_id"] for row in mine}) <= e.n


def test_the_exported_model_gives_the_numbers_of_the_last_probe(probed):
    last = at(probed.evaluations, "after")
    for code, out, err in (probed.same, probed.alone):
        assert code == 0, err
        found = json.loads(out)
        assert found["recorded"] == []
        assert {f"probe/{s}": said for s, said in found["probes"].items()} == {
            suite: e.metrics for suite, e in last.items()
        }
    assert "r-0001 has this already: early_answering, mistake" in probed.same[2]


def test_other_settings_are_recorded_beside_the_runs_own(probed):
    code, out, err = probed.other
    assert code == 0, err
    assert "recorded as a probe of r-0001 after step 2" in err
    now, own = at(probed.stored(), "after"), at(probed.evaluations, "after")
    (new,) = now.keys() - own.keys()
    assert new.startswith("probe/filler/")
    assert now[new].metrics["settings"]["samples"] == 2
    for e in now.values():
        body = e.payload["body"]
        assert read_body(probed.root / body["path"], body["sha256"]).num_rows
    for name in ("samples.parquet", "p/probe.png", "p/probe.svg"):
        assert (probed.home.folder / name).stat().st_size
    assert "probe filler/" in out and "mc_p_correct by share of reasoning" in out


def test_a_text_that_the_model_cannot_write_is_refused(probed):
    code, _, err = probed.unwritable
    assert code == 2
    assert "error: probe.filler is 'ß', which this model's tokenizer cannot encode" in err


def test_two_ranks_find_what_one_finds(probed):
    spec = ExperimentSpec.model_validate_json((probed.root / "spec.json").read_text())
    parts = build_setup(spec)
    model = PretrainedModelSpec(path=str(probed.root / "model"), chat_template=False)
    policy = build_policy(model, seed=0)
    sampler = TransformersSampler(policy, max_rows=512, device=torch.device("cpu"))
    shares = []

    class Rank:
        """One of two that are here one after the other."""

        count = 2

        def __init__(self, rank):
            self.rank = rank

        def gather(self, share):
            shares.append(share)
            return shares if len(shares) == 2 else [share]

    with RewardPool(workers=1, memory_mb=1024) as pool:
        means = build_probe_context(parts, policy, sampler, pool)
        fit = build_prompt_fit(policy, parts)

        def found(ranks):
            return probe_problems(spec.probe, means, fit, spec.seed, ranks, lambda _: None)

        found(Rank(0))
        assert repr(found(Rank(1))) == repr(found(None))  # nan is not nan
