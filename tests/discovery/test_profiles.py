"""Options that a profile sets where the YAML does not, and changes of a run's plugins."""

import json
from dataclasses import asdict

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


@pytest.fixture
def warned(tmp_path):
    """Warnings of a spec with lines added, by the key that they point at."""

    def check(*lines):
        path = tmp_path / "spec.yaml"
        path.write_text(SPEC + "\n".join(lines) + "\n")
        _, plugins = check_file(path)
        return {".".join(map(str, w.path)): w.message for w in plugins.warnings}, plugins

    return check


# The table of profiles: ddof, eps, group of one, environment tokens in GAE, whitening, placement.
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


def test_changes_of_a_runs_plugins_are_told(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC)
    now = check_file(path)[1].provenance
    then = [json.loads(json.dumps(asdict(plugin))) for plugin in now]
    assert list(describe_plugin_changes(now, then)) == []
    (reward,) = (record for record in then if record["kind"] == "reward")
    reward["options"]["allow_decimals"] = True
    (note,) = describe_plugin_changes(now, then)
    assert note == (
        "reward plugin 'countdown.verify' had allow_decimals: True when the run began, and has "
        "False now"
    )
