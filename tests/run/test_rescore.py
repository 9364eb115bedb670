"""`rlx rescore`: a run by its own rules, to the bit, and by others, with what they change."""

from types import SimpleNamespace

import pytest
from trees import entry

from rlx.results.rescoring import Rescoring
from rlx.reward import RewardTable

SIGMA = "estimator.confidence.normalize=std"


def changes(told):
    return {change["what"]: change for change in told["changes"]}


def entries(*raws, weight=1.0):
    given = {(0, n): {"r": entry("r", raw, weight)} for n, raw in enumerate(raws)}
    return RewardTable(turns=given, dropped=frozenset(), faults={})


def test_what_is_absent_is_not_zero():
    then, now = entries(1.0, None, 3.0, None), entries(1.0, 4.0, None, None, weight=0.5)
    found = Rescoring(SimpleNamespace(id="r-0001"))
    found.add_rewards(then, now)
    (change,) = found.changes.values()
    assert (change.n, change.n_before, change.n_after) == (4, 2, 2)
    assert (change.appeared, change.vanished) == (1, 1)
    assert change.means == (2.0, 1.25), "weighted, over those that are there"
    assert change.largest == 0.5


def test_a_run_by_its_own_rules(home, finished):
    told = home.json("rescore", finished.id)
    assert told["same"]
    assert told["steps"] == [1, 2, 3, 4]
    found = changes(told)
    assert {"reward accuracy", "reward brier", "mask", "token_rewards", "advantages"} <= set(found)
    assert all(c["n"] and not c["changed"] for c in found.values())
    said = home.rlx("rescore", finished.id)
    assert "are bit-identical to the stored ones" in " ".join(said.stdout.split())


def test_another_rule_of_sigma_changes_confidences_alone(home, finished):
    told = home.json("rescore", finished.id, "--set", SIGMA)
    found = changes(told)
    changed = {what for what, change in found.items() if change["changed"]}
    assert changed == {"advantages", "returns", "masked_return_sum"}
    assert 0 < found["advantages"]["changed"] < found["advantages"]["n"]
    assert found["advantages"]["after"] > found["advantages"]["before"], "σ is far below 1"
    assert found["advantages"]["turned"] == 0, "σ changes sizes and no sign"
    assert found["token_rewards"]["changed"] == 0
    said = home.rlx("rescore", finished.id, "--set", SIGMA)
    assert "then" in said.stdout


def test_rules_of_another_experiment(home, finished, tmp_path):
    other = tmp_path / "other.yaml"
    text = home.yaml.read_text().replace("weight: 0.1}", "weight: 0.9}")
    other.write_text(text.replace("normalize: center", "normalize: std"))
    found = changes(home.json("rescore", finished.id, "--spec", other))
    assert found["reward format"]["changed"] == found["reward format"]["n"]
    assert found["reward brier"]["changed"] == 0
    assert found["mask"]["changed"] == 0
    assert found["advantages"]["changed"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--set", "rollout.prompts_per_step=2"), "stored rollouts cannot be changed"),
        (("--set", "estimator={name: gae}"), "critic"),
        (("--set", "loss.kl={coefficient: 0.1}"), "did not record"),
        (("--step", "9"), "has no rollouts of step 9; it has steps 1 to 4"),
        (("--set", "estimator.confidnce.normalize=std"), "1 error. Nothing was rescored."),
    ],
)
def test_what_cannot_be_rescored(home, finished, arguments, says):
    done = home.rlx("rescore", finished.id, *arguments)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
