"""The study's experiments: what its arms share, and what sets each apart."""

from pathlib import Path

from rlx.plan import read_spec

STUDY = Path(__file__).parents[2] / "experiments" / "study"
APART = {
    "sigma": {"estimator.confidence.normalize", "estimator.lambda_conf"},
    "prompt_scale": {"estimator.second_level", "estimator.lambda_conf"},
    "ema_scale": {"estimator.second_level", "estimator.lambda_conf"},
    "coupled": {
        *("phases.1.name", "phases.1.set"),
        *("loss.entropy.coefficient", "loss.entropy.span", "loss.entropy.schedule"),
    },
    "accuracy": {"phases.1.name", "phases.1.set"},
}


def leaves(value, path=""):
    """Every value by its path; what a phase sets is one."""
    if isinstance(value, dict) and value and not path.endswith(".set"):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(each, dict) for each in value):
        for number, inner in enumerate(value):
            yield from leaves(inner, f"{path}.{number}")
    else:
        yield path, value


def spec_of(name):
    said = read_spec(STUDY / f"{name}.yaml").spec.model_dump(mode="json")
    return {path: value for path, value in leaves(said) if path != "name"}


def test_arms_share_all_that_does_not_set_them_apart(subtests):
    for arm in APART:
        with subtests.test(arm=arm):
            center, own = spec_of("center"), spec_of(arm)
            unlike = {
                path for path in center.keys() | own.keys() if center.get(path) != own.get(path)
            }
            assert unlike == APART[arm]
            assert own["phases.0.set"] == center["phases.0.set"]
            assert own["phases.1.steps"] == center["phases.1.steps"]


def test_there_are_six_arms():
    bases = {"kg", "probe"}
    assert {path.stem for path in STUDY.glob("*.yaml")} - bases == {"center", *APART}
