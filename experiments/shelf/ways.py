"""The ways on the shelf: their papers, their experiments, and the verdict on each."""

from dataclasses import dataclass
from pathlib import Path

__all__ = ["SAMPLED", "SETS", "SOME", "TASKS", "WAYS", "Way"]

SHELF = "experiments/shelf"
ROOT = Path(__file__).parents[2]
TASKS = ("urn", "misled", "longer", "four", "countdown")
FILES = {"urn": "urn", "misled": "urn", "longer": "urn", "four": "four", "countdown": "countdown"}
"""What the experiments of each task begin with."""
SETS = {
    "misled": ("task.hint=square", "phases.0.steps=240"),
    "longer": ("phases.0.steps=240",),
}
"""Overrides of tasks that have no files of their own. misled: demonstrations hint at the square of
the share, and there are three times as many steps to get away from it. longer: only the steps."""
SOME = {
    "misled": frozenset({"centred", "sigma", "exact", "rlcr", "coupled", "coca", "dcpo"}),
    "longer": frozenset({"centred", "rlcr", "coupled"}),
    "four": frozenset({"centred", "sigma", "exact", "log", "accuracy"}),
    "countdown": frozenset(
        {
            *("centred", "sigma", "exact", "rlcr", "coca", "dcpo", "coupled", "rlcm", "log"),
            *("prompt_scale", "accuracy", "leave_one_out", "group_target", "spherical"),
        }
    ),
}
"""Ways of tasks that not all of them are trained on."""
SAMPLED = {("countdown", "accuracy"), ("countdown", "centred")}
"""Tasks and ways whose models answer every problem several times, for rules to predict."""


@dataclass(frozen=True, slots=True)
class Way:
    """One published way of teaching a confidence.

    Attributes:
        name: of its experiments and results.
        label: name on the page.
        paper: its source, in Markdown.
        verdict: what was seen on the urn, in a sentence; "" before anything was seen.
        on_four, on_countdown: the same for the other tasks.
    """

    name: str
    label: str
    paper: str
    verdict: str = ""
    on_four: str = ""
    on_countdown: str = ""

    def get_verdict(self, task: str) -> str:
        """What was seen on a task, in a sentence; "" before anything was seen."""
        return {"urn": self.verdict, "four": self.on_four, "countdown": self.on_countdown}.get(
            task, ""
        )

    def find_spec(self, task: str) -> str | None:
        """The experiment for a task, relative to the repository root; None if there is none."""
        own = f"{SHELF}/{FILES[task]}_{self.name}.yaml"
        exists = (ROOT / own).exists() and (task not in SOME or self.name in SOME[task])
        return own if exists else None


def _arxiv(number: str) -> str:
    return f"[{number}](https://arxiv.org/abs/{number})"


WAYS = (
    Way(
        "centred",
        "two turns, centred",
        _arxiv("2508.11800"),
        "On the line.",
        on_four="Learns which family it is right in, and nothing of a problem.",
        on_countdown="The default recipe. Its one bit, and a look at the last sum, do as well.",
    ),
    Way(
        "sigma",
        "two turns, σ among siblings",
        _arxiv("2402.03300"),
        "A step: below .5 it says 0, above .5 it says 1. Brier is the worst of all.",
        on_four="The same, but sure of everything: debiased ECE is twice that of centred.",
        on_countdown="Ranks as centred does and is sure of everything: debiased ECE .141 for .044.",
    ),
    Way(
        "exact",
        "two turns, expected score summed",
        "[conventions](conventions.md)",
        "On the line.",
        on_four="The same; right a little more often, its Brier score not shown to be lower.",
        on_countdown="Right more often by .043 [.012, .074]; Brier not shown to differ.",
    ),
    Way(
        "rlcr",
        "RLCR's reward, one sequence, σ",
        _arxiv("2402.03300"),
        "On the line in 80 steps; in 240 it leaves the line.",
        on_countdown="Brier as centred, ranking not shown to be better, but sure "
        "of everything: debiased ECE .123.",
    ),
    Way(
        "coca",
        "CoCA, confidence first",
        _arxiv("2603.05881"),
        "Nearest to the line; its target is the mean of twelve labels, not one.",
        on_countdown="Before the answer, little can be known but the kind of problem.",
    ),
    Way(
        "dcpo",
        "DCPO",
        _arxiv("2603.09117"),
        "On the line: σ within the prompt mixes labels, and half of the target is a mean.",
        on_countdown="Right more often by .027; sure of everything: debiased ECE .126.",
    ),
    Way(
        "coupled",
        "RLCR as published: one sequence, gated, centred",
        _arxiv("2507.16806"),
        "Near the line, flatter than with σ.",
        on_countdown="Right more often by .026, Brier as centred; debiased ECE is "
        "nearly twice as large.",
    ),
    Way(
        "rlcm",
        "forced-answer targets, as in RLCM",
        _arxiv("2604.23333"),
        "On the line.",
        on_countdown="One confidence for a prompt's answers: it knows the kind alone.",
    ),
    Way(
        "log",
        "two turns, log score",
        _arxiv("2508.11800"),
        "Flatter than the line: it avoids 0 and 1, where a wrong label costs most.",
        on_four="As centred.",
        on_countdown="As centred; right more often by .020.",
    ),
    Way(
        "prompt_scale",
        "two turns, one σ per prompt",
        "rlx",
        "On the line.",
        on_countdown="Sure of everything: Brier worse by .031, debiased ECE .157.",
    ),
    Way(
        "accuracy",
        "accuracy only",
        "baseline",
        "As far off as the warm start; confidences may even become unreadable.",
        on_four="Learns nothing: worse than always .5 by .13.",
        on_countdown="Confidences learn nothing: worse than always .5. It is no "
        "more often right than centred.",
    ),
    Way(
        "leave_one_out",
        "two turns, leave-one-out",
        _arxiv("2402.14740"),
        "On the line, as centred, whose direction it has.",
        on_countdown="As centred, whose direction it has.",
    ),
    Way(
        "group_target",
        "two turns, target of the prompt",
        "rlx",
        "On the line.",
        on_countdown="As centred, with a larger debiased ECE.",
    ),
    Way(
        "spherical",
        "two turns, spherical score",
        "Gneiting and Raftery 2007",
        "On the line.",
        on_countdown="The lowest mean Brier score, not shown to be lower than that of centred.",
    ),
    Way("first", "confidence first, centred", "rlx", "Near the line."),
)
"""In the order in which they are trained."""
