"""Settings that an estimator would silently leave out."""

import json

import pytest
from rows import each_row

from rlx.discovery import describe_plugin_changes, load_plugin
from rlx.discovery.experiment_plugins import fill_profile_options
from rlx.plan import check_file
from rlx.spec import PROFILES, CreditSpec

SPEC = """\
name: fit
model: {kind: tiny}
task: {plugin: countdown}
rewards:
  turn:
    accuracy: {plugin: countdown.verify, turn: answer}
phases: [{name: all, steps: 3}]
"""
TWO_TURNS = (
    "rollout: {{schedule: two_turn, confidence: {{template: sure, spans: [confidence]}}, {}}}"
)


@pytest.fixture
def warned(tmp_path):
    """Warnings of a spec with lines added, by the key that they point at."""

    def check(*lines):
        path = tmp_path / "spec.yaml"
        path.write_text(SPEC + "\n".join(lines) + "\n")
        _, plugins = check_file(path)
        return {".".join(map(str, w.path)): w.message for w in plugins.warnings}, plugins

    return check


@each_row(
    ("lines", "key", "text"),
    [
        (["credit: {kl_coef: 0.2}"], "credit.kl_coef", "KL is not part of the reward"),
        (
            ["credit: {kl_adaptive: {target: 0.1}}"],
            "credit.kl_adaptive",
            "KL is not part of the reward",
        ),
        (
            ["loss: {kl: {coefficient: 0.1, kl_penalty: k1}}"],
            "loss.kl.kl_penalty",
            "its gradient is 0 in expectation",
        ),
        (
            ["critic: {warmup_steps: 3}", "estimator: {name: gae}"],
            "critic.warmup_steps",
            "never leaves its warm-up",
        ),
        (
            ["rollout: {schedule: single, answer: {top_p: 0.9}}"],
            "rollout.answer.top_p",
            "log-probabilities are of the full distribution",
        ),
        (
            ["rollout: {schedule: single, answer: {template: go}}"],
            "rollout.answer.template",
            "never sees the problem",
        ),
        (["optimizer: {warmup_steps: 3}"], "optimizer.warmup_steps", "never leaves its warm-up"),
        (
            ["credit: {on_missing_turn: to_last_token}"],
            "credit.on_missing_turn",
            "reads no token rewards",
        ),
        (["credit: {placement: turn_end}"], "credit.placement", "reads no token rewards"),
        (["credit: {turn_reduce: mean}"], "credit.turn_reduce", "reads no token rewards"),
        (
            ["credit: {profile: trl}", "critic: {}", "estimator: {name: gae}"],
            "credit.profile",
            "does not apply to estimator",
        ),
        (
            [
                "critic: {}",
                "estimator: {name: gae}",
                "rollout: {schedule: single, dynamic_sampling: {max_batches: 2}}",
            ],
            "rollout.dynamic_sampling",
            "can learn from those too",
        ),
        (
            [
                "mask: {strategy: turn_spans, fallback: none}",
                TWO_TURNS.format("answer: {spans: []}"),
            ],
            "mask.fallback",
            "no answer ever learns",
        ),
        (
            [
                "estimator: {name: pass_at_k, singleton: raw}",
                TWO_TURNS.format("num_generations_answer: 1"),
            ],
            "rollout.num_generations_answer",
            "a group of one has no signal",
        ),
        (
            [TWO_TURNS.format("num_generations_answer: 1")],
            "rollout.num_generations_answer",
            "a group of one has no signal",
        ),
        (["optimizer: {learning_rate: 5e4}"], "optimizer.learning_rate", "is 50000: AdamW would"),
        (
            ["critic: {learning_rate: 1}", "estimator: {name: gae}"],
            "critic.learning_rate",
            "critic.learning_rate is 1: AdamW would",
        ),
        (
            ["loss: {clip: [0.8, 1.2]}"],
            "loss.clip",
            "[0.8, 1.2], distances from 1: the ratio is clipped to [0.2, 2.2]",
        ),
    ],
)
def test_settings_that_change_nothing_or_too_much(lines, key, text, warned):
    assert text in warned(*lines)[0][key]


@each_row(
    "lines",
    [
        [],
        [
            "credit: {use_kl_in_reward: true, kl_coef: 0.2}",
            "estimator: {name: reinforce_plus_plus}",
        ],
        ["credit: {use_kl_in_reward: true, score_source: token_rewards}"],
        ["credit: {placement: turn_end, score_source: token_rewards}"],
        ["credit: {placement: turn_end}", "estimator: {name: reinforce_plus_plus}"],
        ["loss: {kl: {coefficient: 0.1}}"],
        ["critic: {}", "estimator: {name: gae, lam: 0.95}", "credit: {use_kl_in_reward: true}"],
        ["estimator: {name: remax}"],
        ["loss: {ratio: sequence, clip: [3e-4, 4e-4], aggregate: sequence_mean}"],
        ["loss: {surrogate: cispo, clip: [1.0, 0.28]}"],
        ["rollout: {schedule: single, dynamic_sampling: {max_batches: 3}}"],
        ["optimizer: {learning_rate: 0.1, betas: [0.9, 0.9]}"],
        ["loss: {clip: [0.2, 1.2]}"],
        ["loss: {clip: [0.5, 1.0]}"],
    ],
)
def test_what_fits_is_taken_in_silence(lines, warned):
    assert warned(*lines)[0] == {}


def test_groups_of_equal_samples_have_no_signal(warned):
    _, plugins = warned(TWO_TURNS.format("answer: {top_k: 1}"))
    said = [w.message for w in plugins.warnings if w.path == ("rollout", "answer", "top_k")]
    assert sum("so the 8 samples of a group are equal" in text for text in said) == 1
    other = "estimator: {name: reinforce_plus_plus}"
    _, plugins = warned(other, "rollout: {schedule: single, answer: {top_k: 1}}")
    assert not any("samples of a group" in w.message for w in plugins.warnings)


# ddof, eps, group of one, environment tokens in GAE, whitening, placement.
TABLE = {
    "rlx": (1, 1e-6, "zero", "skip", False, "final_token_only"),
    "verl": (1, 1e-6, "raw", "skip", True, "final_token_only"),
    "trl": (1, 1e-4, "refuse", "skip", False, "final_token_only"),
    "kg_r1": (1, 1e-6, "raw", "literal", True, "final_token_only"),
    "rlcr": (0, 1e-4, "refuse", "skip", False, "final_token_only"),
    "seed000": (1, 1e-6, "raw", "literal", True, "final_token_only"),
    "seed004": (0, 1e-4, "refuse", "skip", False, "final_token_only"),
}


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_is_what_its_estimators_do_where_the_yaml_does_not_say(profile, warned):
    ddof, eps, singleton, environment, whiten, placement = TABLE[profile]
    _, grpo = warned(f"credit: {{profile: {profile}}}")
    assert (grpo.estimator.ddof, grpo.estimator.eps) == (ddof, eps)
    assert grpo.estimator.singleton == singleton
    (recorded,) = [p for p in grpo.provenance if p.kind == "estimator"]
    assert (recorded.options["eps"], recorded.options["singleton"]) == (eps, singleton)
    _, gae = warned(f"credit: {{profile: {profile}}}", "critic: {}", "estimator: {name: gae}")
    assert (gae.estimator.environment, gae.estimator.whiten) == (environment, whiten)
    assert CreditSpec(profile=profile).resolved_placement.plugin == placement


@each_row(
    ("name", "option", "own", "theirs"),
    [
        ("gpg", "alpha", "groups", "scores"),
        ("remax", "returns", "score", "to_go"),
        ("gdpo", "renormalize", "rows", "tokens"),
        ("optimal_token_baseline", "singleton", "zero", "raw"),
    ],
)
def test_the_profile_verl_sets_what_only_one_estimator_has(name, option, own, theirs):
    for profile, value in (("rlx", own), ("verl", theirs)):
        cls = load_plugin("estimator", name)
        assert getattr(cls(**fill_profile_options(cls, {}, profile)), option) == value


def test_changes_of_a_runs_plugins_are_told(warned):
    now = warned()[1].list_records()
    then = json.loads(json.dumps(now))
    assert list(describe_plugin_changes(now, then)) == []
    (reward,) = (record for record in then if record["kind"] == "reward")
    reward["options"]["allow_decimals"] = True
    (note,) = describe_plugin_changes(now, then)
    assert note == (
        "reward plugin 'countdown.verify' had allow_decimals: True when the run began, and has "
        "False now"
    )


def test_the_countdown_rule_of_the_source_warns_at_its_option(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC)
    assert check_file(path)[1].warnings == ()
    warnings = check_file(path, ["rewards.turn.accuracy.ops=python"])[1].warnings
    (warning,) = (w for w in warnings if w.path[-1] == "ops")
    assert warning.path[:-1] == ("rewards", "turn", "accuracy")
    assert warning.severity == "warning"
    assert "reaches 50" in warning.message
