"""Draw the plots of a finished run and record them as artifacts."""

from collections.abc import Sequence
from pathlib import Path

from rlx.evaluation import draw_learning_curves, draw_reliability_diagram
from rlx.home import RunFolder
from rlx.probe import draw_probe_curves, draw_verbal_against_sampled
from rlx.record import recorded_probes
from rlx_registry import Registry

CURVES = (
    "train/reward_answer",
    "train/reward_confidence",
    "calibration/brier",
    "calibration/conf_mean",
    "calibration/alike_share",
    "train/entropy",
    "train/span_entropy",
    "train/kl",
    "sampler/mismatch_k3",
    "sampler/correction_share",
    "train/grad_norm",
    "rollout/len_answer",
    "rollout/zero_signal_answer",
    "rollout/zero_signal_turn",
    "environment/turns",
    "environment/tokens_per_turn",
    "environment/token_share",
)
"""Metrics drawn after the mean of every reward, if the run has them; then accuracy and ECE of every
held-out set, and what the environment reports of its turns."""


def draw_run_pictures(registry: Registry, run_id: str, folder: RunFolder) -> list[Path]:
    """Draws the run's plots from the registry, records them as artifacts, and returns them."""
    made: list[Path] = []
    evaluations = {e.label: e.metrics for e in registry.results.evaluations(run_id, "held_out")}
    before, after = evaluations.get("before"), evaluations.get("after")
    if before and after and before["brier"] is not None:
        made += draw_reliability_diagram(before, after, folder.pictures / "reliability")
    spec = registry.run(run_id).spec["rewards"]
    means = [f"rewards/{name}/mean" for scope in ("turn", "global") for name in spec[scope]]
    known = registry.queries.metric_names(run_id)
    reported = [name for name in known if name.startswith("environment/info/")]
    held_out = [n for n in known if n.startswith("eval/") and n.endswith(("/accuracy", "/ece"))]
    names = [*means, *CURVES, *held_out, *reported]
    curves = registry.results.metrics(run_id, names)
    drawn = {name: curves[name] for name in names if len(curves.get(name, ())) > 1}
    if drawn:
        made += draw_learning_curves(drawn, folder.pictures / "curves")
    _record_pictures(registry, run_id, made)
    return made + draw_probes(registry, run_id, folder)


def _record_pictures(registry: Registry, run_id: str, made: Sequence[Path]) -> None:
    for path in made:
        registry.results.add_artifact(run_id, path, "picture")


def draw_probes(registry: Registry, run_id: str, folder: RunFolder) -> list[Path]:
    """Draws the run's probes, if it has any, records the plots as artifacts, and returns them."""
    probes = recorded_probes(registry, run_id)
    made: list[Path] = []
    if probes:
        made += draw_probe_curves(probes, folder.pictures / "probes")
    own = [probe for probe in probes if probe.suite == "early_answering" and probe.verbal]
    if own:
        made += draw_verbal_against_sampled(own, folder.pictures / "verbal_conf")
    _record_pictures(registry, run_id, made)
    return made
