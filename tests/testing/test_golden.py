"""The golden runner: over the shipped file, over wrong and unknown numbers, over other records."""

import json
import math
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from statistics import mean, pstdev, stdev

import pytest
from click.testing import CliRunner

from rlx.testing.golden import GoldenRecord, check_golden_record, read_golden_records
from rlx.testing.golden.__main__ import main

FILE = Path(__file__).parents[1] / "golden" / "golden.json"
SHIPPED = read_golden_records(FILE).examples


def run(content, tmp_path, *options):
    """Exit code, stdout and stderr of the runner."""
    path = tmp_path / "records.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    done = CliRunner().invoke(main, [str(path), *options])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, done.stderr


def statuses(id, inputs, outputs, config=None, **words):
    record = GoldenRecord(id, inputs, outputs, config or {}, **words)
    return {f.output: (f.status, f.got, f.reason) for f in check_golden_record(record)}


def assert_ok(*args, **kwargs):
    found = statuses(*args, **kwargs)
    assert {name: s for name, (s, *_) in found.items()} == dict.fromkeys(found, "ok"), found


# As a command -------------------------------------------------------------------------------------


def test_every_shipped_record_is_ok():
    command = [sys.executable, "-m", "rlx.testing.golden", str(FILE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    out = done.stdout
    assert done.returncode == 0 and not done.stderr, out
    assert f"{len(SHIPPED)} records" in out and "0 differs, 0 unknown" in out
    assert out.count("got ") + out.count("quoted") >= sum(len(r.outputs) for r in SHIPPED)


def test_one_changed_number_is_found_and_its_record_named(tmp_path):
    content = json.loads(FILE.read_text())
    (record,) = [e for e in content["examples"] if e["id"] == "g11"]
    record["outputs"]["ddof0"][1] += 1e-5
    code, out, _ = run(content, tmp_path)
    assert code == 1 and "1 differs, 0 unknown" in out and out.rstrip().endswith("(in g11)")
    code, out, _ = run(content, tmp_path, "--json")
    differing = [
        (r["id"], o["output"], o["got"][1])
        for r in json.loads(out)["records"]
        for o in r["outputs"]
        if o["status"] == "differs"
    ]
    assert code == 1 and differing == [("g11", "ddof0", pytest.approx(-1.2247418714))]


@pytest.mark.parametrize("form", [lambda r: r, lambda r: [r], lambda r: {"examples": [r]}])
def test_an_unknown_record_is_said_to_be_unknown_in_every_form_of_a_file(form, tmp_path):
    record = {"id": "x1", "title": "\x1b[31mred", "inputs": {"x": 1}, "outputs": {"colour": 2}}
    code, out, _ = run(form(record), tmp_path)
    assert code == 1 and "unknown colour" in out and "no calculation" in out
    assert "\x1b" not in out


def test_an_output_beside_known_ones_is_not_passed_over(tmp_path):
    record = deepcopy(json.loads(FILE.read_text())["examples"][0])
    record["outputs"]["novelty"] = 0.5
    code, out, _ = run(record, tmp_path)
    assert code == 1 and "unknown novelty" in out and "6 ok" not in out


@pytest.mark.parametrize("content", ["no json", '{"id": "g03"}', "[3]"])
def test_a_file_of_another_form_is_refused_in_a_sentence(content, tmp_path):
    code, out, err = run(content, tmp_path)
    assert code == 2 and not out and err.startswith("error: ") and "records.json" in err


# Nothing is copied --------------------------------------------------------------------------------


def zeroed(value):
    if isinstance(value, dict):
        return {k: zeroed(v) for k, v in value.items()}
    if isinstance(value, list):
        return [zeroed(v) for v in value]
    return value if isinstance(value, str) else 0


@pytest.mark.parametrize("record", SHIPPED, ids=lambda record: record.id)
def test_what_is_computed_does_not_depend_on_what_is_expected(record):
    asked = {name for name in record.outputs if name != "rows"}
    blank = replace(record, outputs={name: zeroed(record.outputs[name]) for name in asked})
    found = {f.output: f.got for f in check_golden_record(record) if f.output in asked}
    assert {f.output: f.got for f in check_golden_record(blank)} == found


@pytest.mark.parametrize("record", SHIPPED, ids=lambda record: record.id)
def test_a_record_is_known_by_its_inputs_where_its_id_is_new(record):
    for finding in check_golden_record(replace(record, id="other")):
        assert finding.status in ("ok", "quoted"), finding


# Families of which no record is shipped, worked out by plain Python -------------------------------


def normalised(values, group=None, *, ddof=1, eps=1e-6):
    group = group or values
    sigma = stdev(group) if ddof else pstdev(group)
    return [(v - mean(group)) / (sigma + eps) if sigma else 0.0 for v in values]


def whitened(values):
    centre = mean(values)
    variance = sum((v - centre) ** 2 for v in values) / (len(values) - 1)
    return [(v - centre) / math.sqrt(variance + 1e-8) for v in values]


def on(mask, values, elsewhere=9.0):
    left = iter(values)
    return [next(left) if learns else elsewhere for learns in mask]


def test_g05_placement_at_its_edges():
    inputs = {
        "turn_rewards": {"1": 0.4, "2": 0.2},
        "global_rewards": {"exact_match": 0.3, "_raw_exact_match": 1.0},
        "loss_mask": [1, 1, 0, 1, 0],
        "turn_ids": [1, 1, -1, 2, -1],
    }
    outputs = {
        "no_valid_token": [0.0] * 5,
        "global_only_turn_proportional": [0.1, 0.1, 0.0, 0.1, 0.0],
        "global_only_final_token_only": [0.0, 0.0, 0.0, 0.3, 0.0],
        "missing_entry": [0.0] * 5,
        "turn_proportional": [0.3, 0.3, 0.0, 0.3, 0.0],
        "final_token_only": [0.0, 0.0, 0.0, 0.6, 0.0],
    }
    assert_ok("g05", inputs, outputs)
    nothing = {"turn_rewards": {}, "global_rewards": {}, "loss_mask": [0, 0], "turn_ids": [-1, -1]}
    assert_ok("g05", nothing, {"token_level": [0.0, 0.0], "sum": 0.0})


def test_g10_gae_with_discounts_and_environment_tokens():
    rewards, values, mask = [0.0, 0.2, 0.0, 0.0, 1.0], [0.5, 0.4, 0.9, 0.3, 0.6], [1, 1, 0, 1, 1]
    gamma, lam = 0.9, 0.8

    def recursion(steps):
        advantages, after, ahead = {}, 0.0, 0.0
        for t in reversed(steps):
            after = rewards[t] + gamma * ahead - values[t] + gamma * lam * after
            advantages[t], ahead = after, values[t]
        return [advantages[t] for t in (0, 1, 3, 4)]

    literal, skipped = recursion(range(5)), recursion([0, 1, 3, 4])
    own = [v for v, m in zip(values, mask, strict=True) if m]
    outputs = {
        "advantages": on(mask, literal),
        "returns": on(mask, [a + v for a, v in zip(literal, own, strict=True)]),
        "advantages_skip_info": on(mask, skipped),
        "returns_skip_info": on(mask, [a + v for a, v in zip(skipped, own, strict=True)]),
        "whitened": on(mask, whitened(literal)),
        "whitened_skip_info": on(mask, whitened(skipped)),
    }
    inputs = {"token_level_rewards": rewards, "values": values, "loss_mask": mask}
    assert_ok("g10", inputs, outputs, {"gamma": gamma, "lam": lam})
    wrong = {**outputs, "advantages": on(mask, skipped)}
    assert (
        statuses("g10", inputs, wrong, {"gamma": gamma, "lam": lam})["advantages"][0] == "differs"
    )


def test_g14_uniform():
    samples = [
        {"uid": "p", "turn_rewards": {"1": 0.2, "2": 0.4}, "turn_ids": [1, -1, 2]},
        {"uid": "p", "turn_rewards": {"1": 0.1}, "turn_ids": [1, 1, -1]},
        {"uid": "q", "turn_rewards": {}, "turn_ids": [-1, 1, 1]},
    ]
    for sample, outcome in zip(samples, (0.3, 0.0, 0.7), strict=True):
        sample["global_rewards"] = {"exact_match": outcome, "_kg_turns_used": 5}
    scores = [0.6, 0.1, 0.7]
    advantages = [*normalised(scores[:2]), 0.7 / (1 + 1e-6)]
    tokens = [
        [a if turn > 0 else 0.0 for turn in sample["turn_ids"]]
        for a, sample in zip(advantages, samples, strict=True)
    ]
    outputs = {"scores": scores, "advantages": advantages, "token_advantages": tokens}
    assert_ok("g14", {"samples": samples}, outputs, {"ddof": 1, "epsilon": 1e-6})


def test_g15_the_sources_score_is_the_number_of_tokens_times_the_reward():
    inputs = {"token_level_rewards": [0.0, 0.0, 0.0, 0.7, 0.0], "loss_mask": [1, 1, 0, 1, 0]}
    inputs["values"] = [0.5, 0.1, 0.2, 0.3, 0.0]
    assert_ok("g15", inputs, {"score": 2.1}, {"gamma": 1, "lam": 1})
    assert_ok("g15", {"n_valid": [3, 5], "R": [0.7, 0.2]}, {"score": [2.1, 1.0]})


def test_g18_and_what_else_rlx_cannot_compute_is_unknown():
    found = statuses("g18", {"fractions": [0, 0.5, 1], "same": [0.2, 0.6, 1]}, {"aoc": 0.4})
    assert found["aoc"][0] == "unknown"
    inputs = {"correct": [1, 0], "confidence": [0.9, 0.4]}
    found = statuses("g29", inputs, {"auroc": 1.0, "majority_vote": 1.0})
    assert [found[name][0] for name in ("auroc", "majority_vote")] == ["ok", "unknown"]


def test_g22_the_second_level():
    correct, confidences = [1, 0], [[0.9, 0.5], [0.8, 0.2]]
    rewards = [[1 - (y - c) ** 2 for c in row] for y, row in zip(correct, confidences, strict=True)]
    centred = [r - mean(row) for row in rewards for r in row]
    divided = [a for row in rewards for a in normalised(row, ddof=0, eps=1e-4)]
    sigma = math.sqrt(sum(a * a for a in centred) / 4)
    again = math.sqrt(sum(a * a for a in divided) / 4)

    def pairs(values):
        return [values[:2], values[2:]]

    outputs = {
        "center_only": pairs(centred),
        "within_answer_std": pairs(divided),
        "prompt_scale": pairs([a / (sigma + 1e-4) for a in centred]),
        "prompt_renorm": pairs([a / (again + 1e-4) for a in divided]),
        "ema_scale": pairs([a / (0.25 + 1e-4) for a in centred]),
    }
    config = {"ddof": 0, "eps": 1e-4, "ema_sigma": 0.25}
    assert_ok("g22", {"acc": correct, "conf": confidences}, outputs, config)
    assert_ok("g22", {"conf_reward": rewards}, outputs, config)


def test_g23_confidences_that_tell_nothing_apart():
    words = {"title": "identical confidences -> 0; G_c = 1"}
    outputs = {"identical": [0.0, 0.0, 0.0], "g_c_1": [0.0]}
    assert_ok("g23", {"acc": 1, "conf": [0.7, 0.7, 0.7]}, outputs, {"eps": 1e-4}, **words)
    assert_ok("x", {"identical": [0.91] * 3, "g_c_1": [0.4]}, outputs, **words)


def test_g27_token_losses_become_one_number():
    losses, mask = [[1.0, 2.0, 3.0], [4.0, 5.0, 99.0]], [[1, 1, 1], [1, 1, 0]]
    outputs = {
        "token_mean": 15 / 5,
        "seq_mean_token_mean": (6 / 3 + 9 / 2) / 2,
        "seq_mean_token_sum": 15 / 2,
        "dr_grpo": 15 / (2 * 10),
        "seq-mean-token-sum-norm": 15 / 10,
        "bnpo": 3.0,
        "grpo": 3.25,
    }
    assert_ok("g27", {"token_loss": losses, "mask": mask}, outputs, {"max_len": 10})


def test_g33_a_leaf_against_its_prompt_and_against_its_tree():
    scores, trees = [1.0, 0.0, 0.5, 0.25], ["a", "a", "b", "b"]
    inter = normalised(scores)
    intra = [*normalised(scores[:2]), *normalised(scores[2:])]
    total = [a + b for a, b in zip(inter, intra, strict=True)]
    outputs = {"inter": inter, "intra": intra, "total": total}
    assert_ok("g33", {"scores": scores, "tree": trees}, outputs, {"eps": 1e-6})


def test_g36_reinforce_plus_plus():
    rewards, mask, gamma = [[0.0, 0.5, 1.0], [0.25, 0.75, 9.0]], [[1, 1, 1], [1, 1, 0]], 0.9
    returns = [0.9 * (0.5 + 0.9 * 1.0), 0.5 + 0.9, 1.0, 0.25 + 0.9 * 0.75, 0.75]
    scores, uid = [1.0, 0.0], [7, 7]
    based = whitened([0.5, 0.5, 0.5, -0.5, -0.5])

    def rows(values):
        return [values[:3], [*values[3:], 0.0]]

    outputs = {
        "returns": rows(returns),
        "advantages": rows(whitened(returns)),
        "baseline": rows(based),
    }
    inputs = {"token_level_rewards": rewards, "mask": mask, "scores": scores, "uid": uid}
    assert_ok("g36", inputs, outputs, {"gamma": gamma})


# Countdown cases ---------------------------------------------------------------------------------

CASES = FILE.parent / "countdown_cases.jsonl"


def test_countdown_cases_are_read_with_both_rules():
    done = CliRunner().invoke(main, [str(CASES), "--json"])
    told = json.loads(done.stdout)
    assert {output["output"] for record in told["records"] for output in record["outputs"]} == {
        "scores",
        "source_scores",
    }
    bad = [
        (record["id"], output["output"])
        for record in told["records"]
        for output in record["outputs"]
        if output["status"] != "ok"
    ]
    # Right within a tolerance alone, which exact arithmetic does not have.
    assert bad == [("cd086", "scores"), ("cd087", "scores")]
    decimals = next(r for r in read_golden_records(CASES).examples if r.id == "cd077")
    assert decimals.outputs == {"scores": [0.1], "source_scores": [1.0]}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: a Countdown case also needs 'expected'"),
        ('{"id": "a", "response": "", "numbers": [], "expected": 0}', "also needs 'target'"),
    ],
)
def test_a_malformed_case_is_named_by_its_line(tmp_path, line, why):
    file = tmp_path / "cases.jsonl"
    file.write_text(CASES.read_text().split("\n")[0] + f"\n{line}\n")
    done = CliRunner().invoke(main, [str(file)])
    assert done.exit_code != 0
    assert why in done.stderr
