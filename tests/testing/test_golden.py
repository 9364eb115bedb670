"""The golden runner: over the shipped files, wrong and unknown numbers, and malformed files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlx.discovery import list_installed_plugins
from rlx.testing.golden import (
    GoldenRecord,
    check_golden_record,
    list_golden_functions,
    read_golden_records,
)
from rlx.testing.golden.__main__ import main

FOLDER = Path(__file__).parents[1] / "golden"
FILE = FOLDER / "golden.json"
PEERS = ("gdpo", "kg_r1", "maxrl", "rlcr", "tinyzero", "trl_1_16_0", "verl_0_9_1")
CASES = FOLDER / "countdown_cases.jsonl"


def run(content, tmp_path, *options, name="records.json"):
    """Exit code, stdout and stderr of the runner."""
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    done = CliRunner().invoke(main, [str(path), *options])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, done.stderr


def findings(function, inputs, outputs, **options):
    record = GoldenRecord(function=function, inputs=inputs, outputs=outputs, options=options)
    return {found.output: found for found in check_golden_record(record)}


# As a command -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["golden", *PEERS])
def test_every_shipped_record_is_ok(name):
    file = FOLDER / f"{name}.json"
    done = CliRunner().invoke(main, [str(file)])
    count = len(read_golden_records(file).examples)
    assert (done.exit_code, done.stderr) == (0, ""), done.stdout[-3000:]
    assert count >= 50
    assert f"{count} records" in done.stdout and "0 differs, 0 unknown" in done.stdout
    assert done.stdout.count("got ") >= count


def test_the_runner_is_a_module(tmp_path):
    (tmp_path / "records.json").write_text(json.dumps(RECORD))
    command = [sys.executable, "-m", "rlx.testing.golden", str(tmp_path / "records.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 records; outputs: 1 ok" in done.stdout


def test_functions_are_listed_with_what_they_take():
    done = CliRunner().invoke(main, ["--functions"])
    assert done.exit_code == 0
    assert "credit.group_advantages(scores, group_ids, *, normalize='std', ddof=1" in done.stdout
    assert "rewards.rlcr.brier(a sample, *, invalid_reward=0.0)" in done.stdout
    assert "\na sample: id, problem, turn, number, response" in done.stdout
    names = {function.name for function in list_golden_functions()}
    for kind in ("estimator", "mask", "reward"):
        assert {f"{kind}s.{found.name}" for found in list_installed_plugins(kind)} <= names


def test_every_function_that_is_listed_has_a_summary():
    lacking = [f.name for f in list_golden_functions() if not f.summary.rstrip(".")]
    assert not lacking


def test_no_file_is_a_mistake_of_the_caller():
    done = CliRunner().invoke(main, [])
    assert done.exit_code == 2 and "name a file of records, or use --functions" in done.stderr


def test_one_changed_number_is_found_and_its_record_named(tmp_path):
    content = json.loads(FILE.read_text())
    (record,) = [e for e in content["examples"] if e["id"] == "g11 ddof0"]
    record["outputs"]["value"][1] += 1e-5
    code, out, _ = run(content, tmp_path)
    assert code == 1 and "1 differs, 0 unknown" in out and out.rstrip().endswith("(in g11 ddof0)")
    code, out, _ = run(content, tmp_path, "--json")
    differing = [
        (r["id"], r["function"], o["got"][1])
        for r in json.loads(out)["records"]
        for o in r["outputs"]
        if o["status"] == "differs"
    ]
    assert code == 1
    assert differing == [
        ("g11 ddof0", "credit.group_advantages", pytest.approx(-1.2247418714)),
    ]


RECORD = {
    "function": "credit.prompt_scale",
    "inputs": {"advantages": [1.0, -1.0], "prompt_ids": [0, 0]},
    "options": {"ddof": 0, "eps": 0.0},
    "outputs": {"value": [1.0, -1.0]},
}


@pytest.mark.parametrize("name", ["rlx.credit.prompt_scale", "Credit.Prompt_Scale"])
def test_a_name_may_be_that_of_an_import_and_in_any_case(name, tmp_path):
    code, out, _ = run({**RECORD, "function": name}, tmp_path)
    assert code == 0 and "1 ok" in out


def test_the_area_over_a_curve_of_a_probe():
    inputs = {"shares": [0, 0.5, 1], "same": [0.2, 0.6, 1]}
    (found,) = findings("probe.compute_area_over_curve", inputs, {"value": 0.4}).values()
    assert found.status == "ok"


@pytest.mark.parametrize("form", [lambda r: r, lambda r: [r], lambda r: {"examples": [r]}])
def test_a_file_has_one_of_several_forms(form, tmp_path):
    code, out, _ = run(form(RECORD), tmp_path)
    assert code == 0 and "1 records; outputs: 1 ok" in out
    lines = f"{json.dumps(RECORD)}\n\n{json.dumps(RECORD)}\n"
    code, out, _ = run(lines, tmp_path, name="records.jsonl")
    assert code == 0 and "2 records" in out


def test_tolerances_are_those_of_the_file(tmp_path):
    near = {**RECORD, "outputs": {"value": [1.001, -1.0]}}
    assert run([near], tmp_path)[0] == 1
    assert run({"rtol": 0.01, "examples": [near]}, tmp_path)[0] == 0


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("no json", "records.json: not JSON"),
        ('{"id": "g03"}', "record 1 is not an object with 'function' and 'outputs'"),
        ("[3]", "record 1 is not an object"),
        ([RECORD, {**RECORD, "option": {}}], "record 2: 'option' is none of function, outputs"),
        ([{**RECORD, "inputs": [1]}], "record 1: 'inputs' must be an object"),
    ],
)
def test_a_file_of_another_form_is_refused_in_a_sentence(content, why, tmp_path):
    code, out, err = run(content, tmp_path)
    assert code == 2 and not out and err.startswith("error: ") and why in err


# Nothing is guessed -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"function": "credit.group_advantage"}, "did you mean 'credit.group_advantages'?"),
        ({"function": "grpo"}, "did you mean 'estimators.grpo'?"),
        ({"function": "\x1b[31m"}, "no function is called '\\x1b[31m'"),
        ({"inputs": {"advantages": [1.0]}}, "missing a required argument: 'prompt_ids'"),
        ({"options": {"eps": 0.0, "epsilon": 0.0}}, "unexpected keyword argument 'epsilon'"),
        ({"options": {"advantages": [1.0]}}, "'advantages' is both an input and an option"),
        ({"inputs": {"advantages": [[1.0], []], "prompt_ids": [0, 0]}}, "advantages: "),
        ({"outputs": {"advantages": [1.0]}}, "credit.prompt_scale gives value"),
    ],
)
def test_what_rlx_cannot_compute_is_unknown_and_says_why(change, why, tmp_path):
    code, out, _ = run({**RECORD, **change}, tmp_path)
    assert code == 1 and "1 unknown" in out and why in out
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("function", "inputs", "options", "why"),
    [
        ("estimators.grpo", {"scores": [1.0]}, {}, "'scores' is none of an estimator's inputs"),
        ("estimators.grpo", {}, {}, "at least one input with a value per row"),
        ("estimators.grpo", {"global_rewards": [1.0]}, {"eps": "small"}, "eps"),
        ("estimators.gae", {"token_rewards": [[1.0]]}, {}, "has no values"),
        ("masks.turn_spans", {"is_end": [[1]]}, {}, "a mask needs `is_own`"),
        ("masks.turn_spans", {"own": [[1]]}, {}, "'own' is none of a mask's inputs"),
        ("rewards.rlcr.format", {"text": "x"}, {"pattern": "ta"}, "none of a sample's fields"),
        ("rewards.rlcr.format", {"response": "x"}, {}, "pattern"),
        ("rewards.nothing", {}, {}, "no function is called"),
    ],
)
def test_plugins_refuse_what_they_do_not_take(function, inputs, options, why):
    (found,) = findings(function, inputs, {"value": 0.0}, **options).values()
    assert found.status == "unknown" and why in found.reason


def test_options_of_a_plugin_are_its_yaml():
    turn = {"response": "<answer>1 + 2</answer>", "problem": {"numbers": [1, 2], "target": 4}}
    (found,) = findings("rewards.countdown", turn, {"value": 0.3}, format_score=0.3).values()
    assert found.status == "ok"


def test_a_reward_of_several_samples_gives_lists():
    samples = [{"response": "<confidence>0.5</confidence>", "of": of} for of in (1.0, 0.0)]
    right, wrong = (findings("rewards.rlcr.brier", s, {"value": 0.75})["value"] for s in samples)
    assert (right.status, wrong.status) == ("ok", "ok")


def test_null_is_not_compared_and_everything_else_is():
    given = {"per_row": [2.0], "mask": [[1, 0]]}
    for expected, status in (
        ([[2.0, None]], "ok"),
        ([[2.0, 0.0]], "ok"),
        ([[2.0, 1.0]], "differs"),
        ([[2.0]], "differs"),
        ([2.0, 0.0], "differs"),
        (2.0, "differs"),
    ):
        found = findings("credit.spread_over_mask", given, {"value": expected})["value"]
        assert found.status == status, expected


def test_an_output_beside_known_ones_is_not_passed_over():
    rewards = {"token_rewards": [[1.0]], "values": [[0.5]], "mask": [[1]]}
    found = findings(
        "credit.compute_gae_advantages", rewards, {"advantages": [[0.5]], "novelty": 1}
    )
    assert [f.status for f in found.values()] == ["ok", "unknown"]
    assert found["novelty"].reason.endswith("gives advantages, returns")


# Peers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PEERS)
def test_where_rlx_differs_on_purpose_it_differs(name):
    content = json.loads((FOLDER / f"{name}.json").read_text())
    assert "examples" in content and "differences" in content
    for entry in content["differences"]:
        found = list(check_golden_record(GoldenRecord(**entry)))
        assert found and all(each.status == "differs" for each in found), entry
        assert entry["title"], entry


# Countdown cases ---------------------------------------------------------------------------------


def test_countdown_cases_are_read_with_both_rules():
    done = CliRunner().invoke(main, [str(CASES), "--json"])
    told = json.loads(done.stdout)
    bad = [r["id"] for r in told["records"] for o in r["outputs"] if o["status"] != "ok"]
    # Right within a tolerance alone, which exact arithmetic does not have.
    assert bad == ["cd086", "cd087"]
    by_default, by_source = (
        next(r for r in read_golden_records(CASES).examples if r.id == id)
        for id in ("cd077", "cd077, source")
    )
    assert (by_default.outputs, by_default.options) == ({"value": 0.1}, {})
    assert (by_source.outputs, by_source.options) == ({"value": 1.0}, {"allow_decimals": True})


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: a Countdown case also needs 'id'"),
        ('{"id": "a", "response": "", "numbers": [], "expected": 0}', "also needs 'target'"),
    ],
)
def test_a_malformed_case_is_named_by_its_line(tmp_path, line, why):
    file = tmp_path / "cases.jsonl"
    file.write_text(CASES.read_text().split("\n")[0] + f"\n{line}\n")
    done = CliRunner().invoke(main, [str(file)])
    assert done.exit_code == 2
    assert why in done.stderr
