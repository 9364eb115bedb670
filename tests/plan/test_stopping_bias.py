"""Which experiments are warned that their gradient is biased, and for what."""

from rows import each_row

from rlx.discovery import list_installed_plugins, load_plugin
from rlx.plan import BIASES, find_stopping_bias, list_bias_reasons
from rlx.spec import ExperimentSpec, LossSpec

BLACKJACK = {
    "name": "stop",
    "model": {"kind": "tiny"},
    "task": {"plugin": "kg"},
    "rollout": {"schedule": "environment", "environment": {"plugin": "kg"}, "max_turns": 4},
    "rewards": {"global": {"won": {"plugin": "kg.exact_match"}}},
    "estimator": {"name": "rloo"},
    "loss": {"aggregate": "sequence_sum"},
    "phases": [{"name": "a", "steps": 1}],
    "evaluation": {"correct": "won"},
}


def find(**sections):
    return list(find_stopping_bias(ExperimentSpec.model_validate(BLACKJACK | sections)))


def test_an_unbiased_estimator_and_loss_get_no_warning():
    assert find() == []


@each_row(
    ("section", "said", "path"),
    [
        ({"estimator": {"name": "grpo"}}, "estimator 'grpo' is biased", ("estimator",)),
        ({"loss": {"aggregate": "token_mean"}}, "the loss is biased", ("loss", "aggregate")),
        (
            {"estimator": {"name": "gae"}, "credit": {"placement": "turn_proportional"}},
            "estimator 'gae' is biased",
            ("estimator",),
        ),
    ],
)
def test_each_cause_is_named_where_it_is_set(section, said, path):
    (warning,) = find(**section)
    assert warning.severity == "warning" and warning.path == path
    assert warning.message.startswith(said)


def test_one_turn_leaves_nothing_to_decide():
    rollout = BLACKJACK["rollout"] | {"max_turns": 1}
    assert find(rollout=rollout, estimator={"name": "grpo"}) == []


def test_every_cause_belongs_to_a_shipped_estimator_or_the_loss():
    shipped = {
        load_plugin("estimator", found.name) for found in list_installed_plugins("estimator")
    }
    assert {bias.of for bias in BIASES} <= shipped | {LossSpec}
    assert list_bias_reasons(LossSpec(aggregate="constant"), "turn_end") == []
