"""Plans of experiments whose policy takes turns with an environment."""

from pathlib import Path

import pytest
from rows import each_row

from rlx.discovery import resolve_plugins
from rlx.errors import PluginError
from rlx.phase_setup import build_setup
from rlx.plan import check_file
from rlx.plan.report import select_example_rows
from rlx.plan.trial import load_plan_problems, load_speech, run_trial
from rlx.record import TrainedRows
from rlx.record.rollouts import read_step, rollout_table
from rlx.results.stored_steps import build_stored_accounts
from rlx.reward import RewardPool

KG = Path(__file__).parents[2] / "experiments" / "kg.yaml"
PROMPTS = 3
GAME = {
    "model": "{kind: tiny, tokenizer: arithmetic}",
    "rollout": "{schedule: environment, environment: {plugin: game}, num_generations: 6, "
    "max_turns: 3, turn: {max_new_tokens: 24, spans: [think, answer]}, prompts_per_step: 3}",
    "rewards": "{turn: {even: {plugin: even, turn: said}}, "
    "global: {_won: {plugin: even}, last: {plugin: even, weight: 0.5}}}",
    "evaluation.correct": "_won",
}
FORCED = 'rollout.forced_answer={template: "\\n"}'


@pytest.fixture
def games(plan, game):
    """The plan of a game, with `path=value` over it."""

    def planned(task, *overrides):
        values = {"task": f"{{plugin: {task}}}", **GAME}
        return plan("countdown", *(f"{k}={v}" for k, v in values.items()), *overrides)

    return planned


def told(report):
    return [(f.severity, ".".join(map(str, f.path)), f.message) for f in report.findings]


def own(row, author):
    return [t for t in row.tokens if t.author == author]


def test_a_rollout_is_a_row_of_turns_and_observations(plan):
    report = plan("kg")
    (phase,) = report.phases
    assert told(report) == [] and report.exit_code == 0
    assert phase.schedule.endswith("32 prompts × 8 rollouts of up to 4 turns")
    assert len(phase.rows) == PROMPTS * 8
    for row in phase.rows:
        assert [turn.number for turn in row.turns] == list(range(1, len(row.turns) + 1))
        assert row.kind == row.turns[-1].kind
        assert {t.turn for t in own(row, "policy")} == {turn.number for turn in row.turns}
        between = own(row, "environment")
        assert all(t.turn is None and not t.learns for t in between)
        assert all(t.advantage == t.weight == 0 and not t.placed for t in between)
        assert len({t.turn for t in row.tokens}) == len(row.turns) + bool(between)
    kinds = {turn.kind for row in phase.rows for turn in row.turns}
    assert kinds == {"kg_query", "answer", "invalid"}


def test_groups_and_rows_to_look_at_are_whole_rollouts(plan):
    (phase,) = plan("kg").phases
    assert {group.kind for group in phase.groups} == {"rollout"}
    assert [len(group.rows) for group in phase.groups] == [8] * PROMPTS
    right, wrong = (phase.rows[number] for number in phase.shown)
    match = [next(g.raw for g in r.rewards if g.name == "exact_match") for r in (right, wrong)]
    assert match == [1.0, 0.0] and right.tree == wrong.tree


def test_a_script_hears_what_the_policy_would_be_shown(games):
    (phase,) = games("scripted", FORCED).phases
    said = {}
    for row in phase.rows:
        for number in (1, 2):
            texts = [t.text for t in row.tokens if t.turn == number]
            said.setdefault(number, set()).add("".join(texts).removesuffix("<eos>"))
    assert any(text.startswith("<think>0=0</think>") for text in said[1])
    assert any(text.startswith("<think>1=7</think>") for text in said[2])
    silent = [row for row in phase.rows if row.turns[0].kind == "silent" and len(row.turns) == 4]
    assert len(silent) == PROMPTS  # no tags until it is forced to answer
    for row in silent:
        last = "".join(t.text for t in row.tokens if t.turn == 4)
        assert last.startswith("<think>3=7\n</think>") and row.kind == "said"


def test_a_group_holds_what_training_meets(games):
    for task in ("scripted", "silent"):
        (phase,) = games(task).phases
        for tree in range(PROMPTS):
            rows = [row for row in phase.rows if row.tree == tree]
            tokens = [tuple(t.token for t in row.tokens) for row in rows]
            assert tokens[0] == tokens[4]  # twins
            assert [row.turns[0].kind for row in rows].count("silent") == 2
            assert rows[3].turns[0].finish_reason == "length"
            assert len(rows[2].turns) == 3 and {t.kind for t in rows[2].turns} == {"silent"}


def test_what_is_stored_is_told_as_it_was_planned(plan):
    read, _ = check_file(KG)
    parts = build_setup(read.spec)
    speech = load_speech(parts.spec, resolve_plugins(parts.spec))
    with RewardPool(workers=1, memory_mb=1024) as pool:
        trial = run_trial(parts, load_plan_problems(parts.spec, parts.task, PROMPTS), speech, pool)
    rows = TrainedRows.from_batch(trial.train)
    stored = read_step(rollout_table(trial.trees, trial.table, rows))
    made = build_stored_accounts(stored, parts.spec.credit, speech.dialogue)
    planned = plan("kg").phases[0].rows
    assert [row.turns for row in made] == [row.turns for row in planned]
    assert [row.tokens for row in made] == [row.tokens for row in planned]
    assert select_example_rows(made, "exact_match") == plan("kg").phases[0].shown


def test_tokens_of_a_step_are_those_of_its_rollouts(games):
    (phase,) = games("scripted", FORCED).phases
    policy = sum(len(own(row, "policy")) for row in phase.rows)
    whole = sum(len(row.tokens) + row.context[0].tokens for row in phase.rows)
    prompts = {row.tree: row.context[0].tokens for row in phase.rows}
    again = sum(row.context[0].tokens for row in phase.rows) - sum(prompts.values())
    tokens = phase.tokens
    assert tokens.sampled[0] == pytest.approx(policy)
    assert tokens.shared[0] == pytest.approx(whole - again - (PROMPTS - 1) * tokens.common)
    assert [level.kind for level in tokens.levels] == [
        *("turn 1", "turn 2", "turn 3", "forced answer")
    ]
    assert [level.turns for level in tokens.levels][::3] == [18, PROMPTS]
    assert tokens.sampled[1] == 18 * 4 * 24


@each_row("task", ["scripted", "silent"])
def test_sound_experiments_have_none(games, task):
    assert told(games(task)) == []


@each_row(
    ("how", "why"),
    [
        ("raises", "ValueError: out of dice"),
        ("hangs", "deadline of 0.5 s passed"),
    ],
)
def test_an_environment_that_fails_is_named_with_the_turn_it_was_given(games, how, why):
    report = games("scripted", f"rollout.environment.how={how}", "rollout.environment.deadline=0.5")
    (fault,) = report.findings
    assert report.exit_code == fault.exit_code == 3
    assert fault.path == ("rollout", "environment")
    assert "environment plugin 'game'" in fault.message and fault.message.endswith(why)
    assert fault.notes[0].startswith("its input: turn 2: '<think>1=7</think>")
    (phase,) = report.phases
    if how == "hangs":  # one rollout, one deadline
        assert phase.stopped == "the environment hangs on the first rollout" and not phase.rows
    else:  # it stays silent on nobody's second turn
        assert phase.stopped == "no rollout could be scored"


def test_an_environment_that_cannot_begin(games):
    report = games("scripted", "rollout.environment.on=0")
    (fault,) = report.findings
    assert report.exit_code == 3 and "no board" in fault.message
    assert fault.notes[0].startswith("its input: the start of problem 0: '1+1=")


def test_a_script_that_fails(games):
    with pytest.raises(PluginError, match=r"task plugin 'scripted' failed on `act`, turn 2 .*page"):
        games("scripted", "task.fails_in=2")


@each_row(
    ("override", "place", "said"),
    [
        ("rollout.turn.template=1+1=", "rollout.turn.template", "has no {prompt}"),
        (
            *("rollout.turn.max_new_tokens=6", "rollout.turn.max_new_tokens"),
            "is 6, and ",
        ),
        (
            *("rollout.forced_answer={max_new_tokens: 3}", "rollout.forced_answer.max_new_tokens"),
            "is 3, and 3 of 3 synthetic forced_answers need more",
        ),
        (
            *("rollout.forced_answer={template: '<answer>'}", "rollout.forced_answer.template"),
            "ends with <answer> and never closes it",
        ),
        (
            *("rollout.environment.answers=9", "rollout.max_turns"),
            "18 of 18 synthetic rollouts are not done after 3 turns",
        ),
        (
            *("model={kind: tiny, tokenizer: arithmetic, max_position: 78}", "model.max_position"),
            "holds 78 tokens, and rollouts may take 79",
        ),
        (
            *("rollout.environment.words=2000", "model.max_position"),
            "longer ones end early; 18 of 18 synthetic ones do",
        ),
        ("rollout.turn.spans=[reply]", "rollout.turn.spans", "no synthetic turn has any"),
    ],
)
def test_what_only_rollouts_show(games, override, place, said):
    ((_, _, message),) = [t for t in told(games("scripted", override)) if t[1] == place]
    assert said in message
