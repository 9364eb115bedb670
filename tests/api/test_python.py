"""The Python interface over a stored home: frames hold what the command line prints."""

import json
from pathlib import Path

import pytest
from IPython.lib.pretty import pretty
from rows import each_row
from stored_home import unpack_home
from submissions import submit

import rlx
from rlx.cli import main
from rlx_registry import Registry

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
RLCR = EXPERIMENTS / "rlcr.yaml"
QUICK = EXPERIMENTS / "quick.yaml"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A home with r-0001, which finished, and its twin r-0003."""
    with pytest.MonkeyPatch.context() as patch:
        path = unpack_home(tmp_path_factory.mktemp("stored"))
        patch.setenv("RLX_HOME", str(path))
        patch.delenv("RLX_REGISTRY", raising=False)
        yield path


@pytest.fixture
def printed(home, capsys):
    """What a command prints as JSON."""

    def call(*arguments):
        capsys.readouterr()
        assert main([*arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return call


@pytest.fixture(scope="module")
def run(home):
    return rlx.open_run("r-0001")


def test_what_is_wrong_is_returned_or_raised():
    (finding,) = rlx.validate(RLCR, "sed=7")
    assert (finding.severity, finding.meant) == ("error", "seed")
    with pytest.raises(rlx.SpecError, match="did you mean 'seed'"):
        rlx.read(RLCR, "sed=7")
    with pytest.raises(rlx.SpecError, match="nowhere"):
        rlx.validate("nowhere.yaml")
    with pytest.raises(rlx.SpecError, match="no such file, but an example: rlx new --from quick"):
        rlx.read("quick")


def brevity(sample, *, longest: int = 40) -> float:
    """1 for short answers."""
    return float(len(sample.response) <= longest)


ENDLESS = {"plugin": "dataset"}
ENDLESS["again"] = ENDLESS


def test_an_experiment_is_given_as_a_mapping_or_as_an_object():
    told = rlx.read(RLCR)
    mapping = told.loaded.document.tree
    for source in (mapping, told.spec, {"extends": str(RLCR)}):
        experiment = rlx.read(source, "seed=7")
        assert experiment.spec.digest == told.spec.digest and experiment.spec.seed == 7
    model = type(told.spec.model)(**told.spec.model.model_dump())
    assert rlx.read({**mapping, "model": model}).spec == told.spec


@each_row(
    "changes, message",
    [
        ({"sed": 7}, r"unknown key 'sed'.*<python>:\d+:3.*did you mean 'seed'"),
        ({"seed": "7"}, r"<python>:.*seed"),
        ({"task": {"plugin": "dataset", "path": object()}}, "YAML: it has a value of type object"),
        ({"rewards": {"turn": {"a": {"plugin": lambda sample: 1.0}}}}, "a lambda has no"),
        ({"name": brevity}, "'name' must be made of letters.*, not text 'brevity.py@"),
        ({"task": ENDLESS}, "cannot be written as YAML: Circular reference"),
    ],
)
def test_faults_of_a_mapping_are_named(changes, message):
    with pytest.raises(rlx.SpecError, match=f"(?s){message}"):
        rlx.read({**rlx.read(RLCR).loaded.document.tree, **changes})


@each_row(
    "call, message",
    [
        (lambda: rlx.read(3), "an experiment is a file, a mapping or an ExperimentSpec, not a int"),
        (lambda: rlx.read(RLCR, ["seed=7"]), "an override is text, path.to.key=value, not a list"),
        (lambda: rlx.open_run(1), "a run is named by text, such as 'latest', not by a int"),
        (lambda: rlx.score({"response": "a"}, brevity), "a list with a mapping for each response"),
        (lambda: rlx.score(["a"], brevity), "a list with a mapping for each response"),
        (lambda: rlx.evaluate("r-0001", samples=0), "samples is 0: it must be"),
        (lambda: rlx.evaluate(3), "the target is a run, its name, or a model's folder or name"),
    ],
)
def test_what_is_of_another_type_is_named(call, message):
    with pytest.raises(rlx.SpecError, match=message):
        call()


def test_a_function_is_a_reward_kept_with_its_run(tmp_path, monkeypatch):
    monkeypatch.setenv("RLX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    short = {"plugin": brevity, "longest": 10, "turn": "answer"}
    run = rlx.submit({"extends": str(QUICK), "rewards": {"turn": {"short": short}}}, queue=True)
    named = run.record.spec["rewards"]["turn"]["short"]
    assert named["longest"] == 10 and named["plugin"].startswith("brevity.py@")
    (kept,) = (tmp_path / "home" / "plugins").glob("*.py")
    assert "def brevity(sample" in kept.read_text()
    assert run.status == "queued"
    scores = rlx.score([{"response": "a" * n} for n in (10, 50)], brevity, "longest=20").score
    assert scores.tolist() == [1.0, 0.0]


def test_a_plan_has_a_row_per_token(printed):
    plan = rlx.plan_experiment(RLCR)
    tokens = plan.tokens()
    report = printed("plan", str(RLCR))
    rows = [row for phase in report["phases"] for row in phase["rows"]]
    assert len(tokens) == sum(len(row["tokens"]) for row in rows)
    first = rows[0]["tokens"]
    assert tokens.advantage[: len(first)].tolist() == [token["advantage"] for token in first]
    assert {"placed/accuracy", "placed/brier"} <= set(tokens.columns)
    assert not tokens["placed/brier"].isna().any()
    assert [f.message for f in plan.findings] == [f["message"] for f in report["findings"]]


def test_a_notebook_shows_a_plan_and_faults_as_the_command_line_does(capsys, monkeypatch):
    capsys.readouterr()
    assert main(["plan", str(RLCR), "--set", "evaluation.problems=7"]) == 0
    printed = capsys.readouterr().out.split()
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a notebook's kernel has it
    shown = pretty(rlx.plan_experiment(RLCR, "evaluation.problems=7")).split()
    assert "learns" in shown and "findings" in shown
    assert shown == printed[: len(shown)]
    (fault,) = rlx.validate(RLCR, "sed=7")
    assert pretty(fault).startswith("error: unknown key 'sed'\n  --> <override>:1:1\n")


def test_runs_are_listed_newest_first(home):
    assert [run.id for run in rlx.list_runs()] == ["r-0003", "r-0002", "r-0001"]
    assert rlx.list_runs(name="nobody") == []
    assert rlx.open_run("1") == rlx.open_run("r-0001") != rlx.open_run()
    with pytest.raises(rlx.SpecError, match="r-0900"):
        rlx.open_run("r-0900")
    with pytest.raises(rlx.SpecError, match="there is no registry of runs"):
        rlx.open_run(registry=f"sqlite:///{home}/none.db")


def test_a_finished_run_is_not_waited_for(run, printed):
    assert run.wait(timeout=0) is run
    assert run.status == printed("status", "r-0001")["status"] == "finished"
    assert run.record.steps_total == 16
    with pytest.raises(rlx.SpecError, match="is not running"):
        run.stop()
    with pytest.raises(rlx.SpecError, match="r-0001 is finished: nothing to resume"):
        run.resume()


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [("failed", 3, rlx.PluginError), ("failed", 1, rlx.RlxError), ("stopped", 1, rlx.RlxError)],
)
def test_waiting_raises_what_a_run_ended_with(tmp_path, status, code, kind):
    url = f"sqlite:///{tmp_path}/registry.db"
    with Registry.open(url) as registry:
        made = submit(registry)
        registry.update_run(made.id, directory=tmp_path)
        waiting = rlx.open_run(registry=url)
        with pytest.raises(TimeoutError, match="r-0001 has not ended: it is submitted"):
            waiting.wait(timeout=0)
        registry.results.add_event(made.id, "failed", "why", {"exit_code": code}, "error")
        registry.transition(made.id, ["submitted"], status, "the scorer is out of order")
    with pytest.raises(kind, match=f"r-0001 {status}: the scorer is out of order") as error:
        waiting.wait()
    assert type(error.value) is kind


def test_metrics_are_by_step(run, home):
    frame = run.metrics("train/kl", "rewards/accuracy/mean")
    assert list(frame.columns) == ["train/kl", "rewards/accuracy/mean"]
    with Registry.open(f"sqlite:///{home}/registry.db", read_only=True) as registry:
        recorded = registry.results.metrics("r-0001", ["train/kl"])["train/kl"]
    assert list(frame["train/kl"].dropna().items()) == list(recorded)
    assert len(run.metrics().columns) > 40
    with pytest.raises(rlx.SpecError, match="no metric 'train/kll'"):
        run.metrics("train/kll")


def test_evaluations_have_a_row_each(run, printed):
    frame = run.evaluations().set_index(["suite", "label"])
    shown = printed("status", "r-0001")["evaluation"]["after"]
    after = frame.loc[("held_out", "after")]
    assert {name: after[name] for name in ("accuracy", "brier", "n")} == {
        name: shown[name] for name in ("accuracy", "brier", "n")
    }


def test_answers_explain_the_accuracy(run):
    answers = run.answers(label="before")
    before = run.evaluations().set_index(["suite", "label"]).loc[("held_out", "before")]
    assert answers.correct.mean() == before.accuracy
    assert answers.confidence.notna().mean() == before.readable_share
    with pytest.raises(rlx.SpecError, match="no recorded answers of 'far'"):
        run.answers("far")


def test_rollouts_are_the_samples(run, printed):
    frame = run.rollouts(16)
    shown = printed("samples", "r-0001", "--step", "16", "--limit", "1000")
    assert frame.sort_values("row").advantage.tolist() == [
        row["advantage"] for row in sorted(shown, key=lambda row: row["row"])
    ]
    assert set(run.rollouts().step) == set(range(1, 17))
    with pytest.raises(rlx.SpecError, match="no rollouts of step 17; it has steps 1 to 16"):
        run.rollouts(3, 17)


def test_trajectories_are_the_credit_of_tokens(run, printed):
    frame = run.trajectories()
    shown = printed("samples", "r-0001", "--credit")["rows"]
    flat = [(row["row"], token) for row in shown for token in row["tokens"]]
    assert len(frame) == len(flat)
    for name in ("text", "author", "learns", "advantage", "weight"):
        assert frame[name].tolist() == [token[name] for _, token in flat], name
    assert frame.row.tolist() == [number for number, _ in flat]
    assert frame[~frame.learns].advantage.eq(0).all()


def test_what_is_drawn_is_shown_by_a_notebook(run):
    drawn = run.plot()
    stems = {file.stem for file in drawn.files}
    assert {"reliability", "curves"} <= stems
    assert {file.suffix for file in drawn.files} == {".png", ".svg"}
    shown = drawn._repr_html_()
    assert all(f'alt="{stem}"' in shown for stem in stems)
    assert shown.count("data:image/svg+xml;base64,") == len(stems)


def test_a_run_is_checked_and_its_model_is_exported(run, tmp_path):
    report = run.check(step=16)
    assert report.holds and report.steps == (16,)
    folder = run.export(tmp_path / "model", card=True)
    assert (folder / "config.json").is_file()
    assert f"digest `{run.record.digest}`" in (folder / "README.md").read_text()
    with pytest.raises(rlx.SpecError, match="already exists"):
        run.export(folder)
    with pytest.raises(rlx.SpecError, match="with_data belongs to card"):
        run.export(tmp_path / "data", with_data=True)


def test_recipes_are_compared(run, printed):
    comparison = rlx.compare(run.id, "r-0003")
    frame = comparison.to_frame()
    shown = printed("compare", "r-0001", "r-0003")
    pairs = {(f["suite"], f["metric"]) for f in shown["figures"]}
    assert set(zip(frame.suite, frame.metric, strict=True)) == pairs
    assert comparison.spec.keys() == shown["spec"].keys()
    with pytest.raises(rlx.SpecError, match="no run, group or experiment 'nobody'"):
        rlx.compare("nobody")


def test_a_run_is_rescored_to_the_bit(run):
    found = rlx.rescore(run.id, steps=[16])
    assert found.is_identical and found.steps == [16]
    opened = rlx.rescore(run, steps=[16], registry="sqlite:///none.db")
    assert opened.to_json() == found.to_json()


def test_responses_are_scored(tmp_path):
    responses = [
        {"response": "<answer>1 + 2</answer>", "numbers": [1, 2], "target": 3, "id": "right"},
        {"response": "<answer>1 - 2</answer>", "numbers": [1, 2], "target": 3},
        {"numbers": [1, 2]},
    ]
    frame = rlx.score(responses, "countdown.verify")
    assert frame.status.tolist() == ["scored", "scored", "absent"]
    assert frame.score.tolist()[:2] == [1.0, 0.0] and frame.id[0] == "right"
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in responses))
    assert rlx.score(file, "countdown.verify").equals(frame)
    with pytest.raises(rlx.PluginError, match=r"countdown\.verify"):
        rlx.score(responses, "countdown.verfy")
    with pytest.raises(rlx.EnvironmentFault, match="cannot read"):
        rlx.score(tmp_path / "none.jsonl", "countdown.verify")
