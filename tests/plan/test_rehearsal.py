"""`rlx submit` rehearses an experiment before it records a run of it."""

from pathlib import Path

import pytest
from rows import each_row

from rlx import api
from rlx.cli import main
from rlx.errors import PluginError, SpecError
from rlx.plan import rehearsal_checks
from rlx_registry import Registry

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
NOTHING = ("mask={strategy: turn_spans, fallback: none}", "rollout.answer.spans=[reply]")
UNWRITABLE = ("model.tokenizer=world", 'rollout.forced_answer.template="é"')


@pytest.fixture
def submit(tmp_path, monkeypatch, capsys):
    """Submits an experiment to the queue; returns exit code, report and number of recorded runs."""
    monkeypatch.setenv("RLX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RLX_REGISTRY", raising=False)

    def run_submit(name, *sets, options=()):
        overrides = [f"--set={one}" for one in sets]
        command = ["submit", str(EXPERIMENTS / f"{name}.yaml"), "--queue", *options, *overrides]
        code = main(command)
        return code, capsys.readouterr().err, count_runs(tmp_path)

    return run_submit


def count_runs(folder):
    file = folder / "home" / "registry.db"
    if not file.exists():
        return 0
    with Registry.open(f"sqlite:///{file}", read_only=True) as registry:
        return len(registry.runs())


@each_row(
    ("name", "sets", "code", "line", "said"),
    [
        ("countdown", NOTHING, 2, "mask={strategy", "selects no token of any synthetic response"),
        ("kg", UNWRITABLE, 2, "forced_answer.template", "has no token for 'é'"),
        (
            "countdown",
            ["rewards.turn.guest={plugin: raises, turn: answer}"],
            *(3, "rewards.turn.guest={plugin: raises", "ValueError: out of order"),
        ),
    ],
)
def test_an_experiment_that_cannot_learn_is_refused(submit, guests, name, sets, code, line, said):
    found, report, runs = submit(name, *sets)
    assert (found, runs) == (code, 0)
    assert said in report
    assert any(line in shown for shown in report.splitlines() if shown.startswith(" "))
    assert "--no-rehearsal` skips it" in report and "1 error. Nothing was submitted." in report


def test_what_a_reward_prints_is_apart(guests, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("RLX_HOME", str(tmp_path / "home"))
    path = str(EXPERIMENTS / "countdown.yaml")
    assert main(["plan", path, "--set=rewards.turn.guest={plugin: scribbles, turn: answer}"]) == 0
    out, err = capfd.readouterr()
    assert "\nscribbles: seen\\x1b[2J\n" in err and "\x1b" not in out + err
    assert "import of a plugin: imported\n" in err and "imported" not in out


def test_without_a_rehearsal_it_is_recorded(submit):
    code, report, runs = submit("countdown", *NOTHING, options=["--no-rehearsal"])
    assert (code, report, runs) == (0, "", 1)


def test_what_is_only_likely_is_a_warning_and_an_event_of_the_run(submit, tmp_path, capsys):
    code, report, runs = submit("urn", "rollout.answer.top_k=5")
    assert (code, runs) == (0, 1)
    of_file, of_trial = "rollout.answer.top_k is 5", "no group of synthetic answers has a signal"
    assert f"warning: {of_file}" in report and f"warning: {of_trial}" in report
    with Registry.open(f"sqlite:///{tmp_path}/home/registry.db", read_only=True) as registry:
        events = registry.results.events("r-0001")
    warned = [event.message for event in events if event.kind == event.level == "warning"]
    assert [of_file in warned[0], of_trial in warned[1], len(warned)] == [True, True, 2]
    assert main(["status", "r-0001"]) == 0
    assert warned[0] in " ".join(capsys.readouterr().out.split())


def test_members_of_a_group_share_a_rehearsal(submit, monkeypatch):
    made = []
    rehearse = rehearsal_checks.rehearse_experiment
    monkeypatch.setattr(
        rehearsal_checks, "rehearse_experiment", lambda *one: made.append(one[0]) or rehearse(*one)
    )
    grid = ["--grid", "optimizer.learning_rate=0.1,0.2", "--grid", "estimator.normalize=std,center"]
    code, report, runs = submit("urn", options=["--seeds", "0..1", *grid])
    assert (code, runs, len(made)) == (0, 8, 2)
    assert [one.spec.resolve_phase_spec(one.spec.phases[0]).seed for one in made] == [0, 0]
    assert report.count("no group of synthetic answers has a signal") == 1


def test_no_member_of_a_group_is_recorded_where_one_cannot_learn(submit):
    grid = ["--grid", "mask.fallback=response,none"]
    strange = ("rollout.answer.spans=[reply]",)
    code, report, runs = submit("countdown", *strange, options=["--seeds", "0..1", *grid])
    assert (code, runs) == (2, 0)
    assert report.count("error: mask strategy 'turn_spans' selects no token") == 1


def test_python_rehearses_too(submit, guests, tmp_path):
    path, fails = (
        EXPERIMENTS / "countdown.yaml",
        "rewards.turn.guest={plugin: raises, turn: answer}",
    )
    with pytest.raises(SpecError, match="selects no token"):
        api.submit(path, *NOTHING, queue=True)
    with pytest.raises(PluginError, match="out of order"):
        api.submit(path, fails, queue=True)
    assert count_runs(tmp_path) == 0
    api.submit(path, fails, queue=True, rehearse=False)
    assert count_runs(tmp_path) == 1


def test_large_steps_are_planned_on_a_few_rollouts(plan):
    for prompts, answers, rows in ((100000, 8, 3 * 8), (2, 100000, 2 * 390)):
        sets = (
            f"rollout.num_generations_answer={answers}",
            f"rollout.prompts_per_step={prompts}",
        )
        (phase,) = plan("countdown", *sets).phases
        assert (len(phase.rows), phase.tokens.levels[0].turns) == (rows, prompts * answers)
