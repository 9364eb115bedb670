"""What a plan finds that reading the file cannot."""

from rows import each_row


def told(report):
    return [(f.severity, ".".join(map(str, f.path)), f.message) for f in report.findings]


def test_a_budget_that_is_too_small(plan):
    place = "rollout.confidence.max_new_tokens"
    ((level, message),) = [(s, m) for s, p, m in told(plan("rlcr", f"{place}=2")) if p == place]
    assert level == "warning" and "48 of 48 synthetic confidences" in message


def test_a_think_tag_that_the_first_prompt_opens_is_fine(plan):
    report = plan("countdown", 'rollout.answer.template="{prompt}<think>"')
    assert told(report) == [] and report.exit_code == 0


def test_spans_that_nothing_has(plan):
    report = plan("countdown", "rollout.answer.spans=[reply]", "model={kind: tiny}")
    places = ["rollout.answer.spans", "rewards.turn.score", "rewards"]
    assert [t[1] for t in told(report)] == places


@each_row(("plugin", "why"), [("gives_nan", "gave nan"), ("raises", "out of order")])
def test_a_scorer_that_fails_is_named_with_what_it_was_given(plan, guests, plugin, why):
    report = plan("countdown", f"rewards.turn.guest={{plugin: {plugin}, turn: answer}}")
    (fault,) = report.findings
    assert report.exit_code == fault.exit_code == 3
    assert f"reward plugin {plugin!r} (rewards.turn.guest)" in fault.message
    assert why in fault.message and "7+3+4" in fault.notes[0]
    assert fault.position.text.startswith("rewards.turn.guest")


def test_a_scorer_that_fails_and_may(plan, guests):
    report = plan(
        "countdown", "rewards.turn.guest={plugin: gives_nan, turn: answer, on_error: drop_sample}"
    )
    assert [f.severity for f in report.findings] == ["warning"]
    assert 0 < len(report.phases[0].rows) < len(plan("countdown").phases[0].rows)


def test_a_scorer_that_hangs_costs_one_deadline(plan, guests):
    report = plan("rlcr", "rewards.turn.guest={plugin: hangs, turn: answer, deadline: 0.5}")
    assert report.exit_code == 3 and "deadline of 0.5 s" in report.findings[0].message
    assert len(report.phases) == 1 and report.phases[0].stopped


def test_a_weight_on_a_reward_that_nothing_produces(plan, guests):
    reward = "rewards.turn.guest={plugin: abstains, turn: answer, weight: 2}"
    (fault,) = plan("countdown", reward).findings
    assert fault.severity == "warning" and fault.path[2] == "guest"
    assert "a weight of 2 on a reward that no synthetic" in fault.message


def test_what_only_a_phase_brings_about_is_told_at_its_setting(plan):
    phases = "[{name: a, steps: 1, set: {rollout.answer.max_new_tokens: 2}}, {name: b, steps: 1}]"
    report = plan("countdown", f"phases={phases}")
    first = report.findings[0]
    assert first.path == ("phases", 0, "set", "rollout.answer.max_new_tokens")
    assert first.message.endswith("(phase 'a')")


def test_data_that_are_missing_are_stood_in_for(plan, guests):
    task = "task={plugin: dataset, train: {path: nowhere.jsonl}, held_out: 0.1}"
    rewards = "rewards={turn: {_accuracy: {plugin: exact_match, turn: answer}, \
guest: {plugin: raises, turn: answer}}}"
    report = plan("countdown", task, rewards, "model={kind: tiny}")
    assert "nowhere.jsonl" in report.notes[0] and "stand in" in report.notes[0]
    (fault,) = report.findings  # a scorer may need what the stand-in lacks
    assert fault.severity == "warning" and report.exit_code == 0


TWO_POINTS = """
def two_points(sample):
    return 2.0 * (sample.spans.get("answer", "").strip() == sample.problem["answer"])
"""


def test_data_and_rewards_of_ones_own(plan, tmp_path, monkeypatch):
    """What reading the file cannot show: no figure of it would tell that anything is wrong."""
    monkeypatch.setenv("RLX_HOME", str(tmp_path / "home"))
    (tmp_path / "points.py").write_text(TWO_POINTS)
    lines = [f'{{"question": "{n} + 1 =", "answer": "{n + 1}"}}\n' for n in range(8)]
    files = {"train": lines[:5], "test": lines[5:], "worked": lines[3:6], "far": lines[:1]}
    for name, some in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(some))

    def read(train, test, more=""):
        paths = (
            f"train: {{path: {tmp_path}/{train}.jsonl}}, test: {{path: {tmp_path}/{test}.jsonl}}"
        )
        return f"{{plugin: dataset, prompt: '{{question}}', {paths}{more}}}"

    def start(train, test, form):
        worked = read(train, test, f", demonstrations: ['{form}']")
        return f"model={{kind: tiny, tokenizer: bytes, warm_start: {{demonstrations: {worked}}}}}"

    points = f"rewards.turn.score={{plugin: {tmp_path}/points.py:two_points, turn: answer}}"
    form = "<answer>{answer}</answer>"
    cases = [  # overrides, what is warned of, and how
        (
            [points, "evaluation.correct=score"],
            ("evaluation.correct", "for synthetic ones it is 0, 2: accuracy would be 0"),
        ),
        (
            ["evaluation.problems=4"],
            ("evaluation.problems", "is 4, but there are 3 held-out problems"),
        ),
        (
            ["evaluation={correct: exact}"],
            ("evaluation.problems", "is 600, but there are 3 held-out problems"),
        ),
        (
            [start("train", "test", f"<why>one more</why>{form}")],
            (
                "rollout.answer.spans",
                "names think, which no worked answer of the warm start has; it has why, answer",
            ),
        ),
        (
            [start("worked", "far", f"<think>one more</think>{form}")],
            ("model.warm_start", "1 of 3 held-out problems are among the demonstrations"),
        ),
        (
            ["rewards.turn.brier={plugin: rlcr.brier, turn: answer, of: exact}"],
            ("rewards.turn.brier", "is 0 for every synthetic answer: no confidence"),
        ),
    ]
    own = "rewards={turn: {exact: {plugin: exact_match, turn: answer}}}"
    room = "rollout.answer.max_new_tokens=90"
    base = ("model={kind: tiny, tokenizer: bytes}", room, f"task={read('train', 'test')}", own)
    wrong = []
    for overrides, (path, text) in cases:
        given = (*base, "evaluation={problems: 3, correct: exact}", *overrides)
        found = [(p, m) for _, p, m in told(plan("countdown", *given))]
        if [p for p, m in found if text in m] != [path] or len(found) != 1:
            wrong.append((text, found))
    assert not wrong
