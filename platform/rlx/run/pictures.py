"""Draw the plots of a finished run and record them as artifacts."""

from pathlib import Path

from rlx.evaluation import (
    TurnDistribution,
    draw_distributions,
    draw_learning_curves,
    draw_reliability_diagram,
)
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

COLUMNS = 60
"""Approximate number of evenly spaced steps whose distributions are drawn."""


def draw_run_pictures(registry: Registry, run_id: str, folder: RunFolder) -> list[Path]:
    """Draws the run's plots from the registry, records them as artifacts, and returns them."""
    made: list[Path] = []
    evaluations = {e.label: e.metrics for e in registry.results.evaluations(run_id, "held_out")}
    before, after = evaluations.get("before"), evaluations.get("after")
    if before and after and before["brier"] is not None:
        made += draw_reliability_diagram(before, after, folder.pictures / "reliability")
    spec = registry.run(run_id).spec["rewards"]
    rewards = [f"rewards/{name}/mean" for scope in ("turn", "global") for name in spec[scope]]
    known = registry.queries.metric_names(run_id)
    reported = [name for name in known if name.startswith("environment/info/")]
    held_out = [n for n in known if n.startswith("eval/") and n.endswith(("/accuracy", "/ece"))]
    names = [*rewards, *CURVES, *held_out, *reported]
    curves = registry.results.metrics(run_id, names)
    drawn = {name: curves[name] for name in names if len(curves.get(name, ())) > 1}
    if drawn:
        made += draw_learning_curves(drawn, folder.pictures / "curves")
    if kinds := _collect_spreads(registry, run_id):
        made += draw_distributions(kinds, folder.pictures / "distributions")
    for path in made:
        registry.results.add_artifact(run_id, path, "picture")
    return made + draw_probes(registry, run_id, folder)


def _collect_spreads(registry: Registry, run_id: str) -> dict[str, list[TurnDistribution]]:
    """Rewards and lengths of trained turns by kind, at about `COLUMNS` evenly spaced steps."""
    steps = registry.results.rollout_steps(run_id)
    kinds: dict[str, list[TurnDistribution]] = {}
    for step in steps[:: max(1, len(steps) // COLUMNS)]:
        rows = registry.results.rollout_index(run_id, step)
        for kind in sorted({row.turn for row in rows}):
            own = [row for row in rows if row.turn == kind]
            rewards = [row.reward for row in own if row.reward is not None]
            kinds.setdefault(kind, []).append((step, rewards, [r.n_tokens for r in own]))
    return kinds


def draw_probes(registry: Registry, run_id: str, folder: RunFolder) -> list[Path]:
    """Draws the run's probes, if it has any, records the plots as artifacts, and returns them."""
    probes = recorded_probes(registry, run_id)
    made: list[Path] = []
    if probes:
        made += draw_probe_curves(probes, folder.pictures / "probes")
    own = [probe for probe in probes if probe.suite == "early_answering" and probe.verbal]
    if own:
        made += draw_verbal_against_sampled(own, folder.pictures / "verbal_conf")
    for path in made:
        registry.results.add_artifact(run_id, path, "picture")
    return made
