"""`make docs`: generates a page for every advantage estimator of rlx from code and docstrings.

    python docs/make/estimator_pages.py

Writes docs/estimators/: a table of all estimators, and for each its formula, options, source, and a
picture of its token advantages on a small example. The formula is read from the docstring of the
implementation, the numbers are computed by calling it.
"""

import inspect
import re
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from rlx.credit import Credit, CreditInputs, place_rewards, total_scores
from rlx.discovery import (
    bind_implementation,
    import_implementation,
    list_installed_plugins,
    load_plugin,
)
from rlx.spec import FinalTokenOnly, read_field_meanings

FOLDER = Path(__file__).parents[2] / "docs" / "estimators"
OURS = "rlx"
OF_TREES = ("two_level", "tree_grpo")


# Two small examples ------------------------------------------------------------------------------


def rollouts() -> CreditInputs:
    """One prompt, four rollouts: two turns with what an environment wrote between them, or one.

    The columns are tokens: a turn, two of the environment, a second turn.
    """
    turn_ids = torch.tensor(
        [
            [1, 1, 1, -1, -1, 2, 2, 2],
            [1, 1, -1, -1, 2, 2, -1, -1],
            [1, 1, 1, -1, -1, 2, -1, -1],
            [1, 1, 1, 1, -1, -1, -1, -1],
        ]
    )
    absent = float("nan")
    turn_rewards = torch.tensor([[0.25, 0.25], [0.25, 0.1], [0.1, 0.25], [0.1, absent]])
    values = torch.tensor([0.4, 0.5, 0.5, 0.0, 0.0, 0.6, 0.7, 0.8]).expand(4, -1)
    steps = torch.where(turn_ids > 0, turn_ids - 1, -1)
    return _placed(
        turn_rewards=turn_rewards,
        global_rewards=torch.tensor([0.7, 0.4, 0.3, 0.0]),
        turn_ids=turn_ids,
        group_ids=torch.zeros(4, dtype=torch.int64),
        levels=torch.zeros(4, dtype=torch.int64),
        tree_ids=torch.zeros(4, dtype=torch.int64),
        state_ids=torch.tensor([[0, 1], [0, 1], [0, 2], [0, -1]]),
        streams={
            "values": values,
            "old_logprobs": torch.tensor([0.2, 0.5, 0.8, 1, 1, 0.4, 0.6, 0.9]).log().expand(4, -1),
            "collision_probs": torch.full((4, 8), 0.6),
            "greedy_scores": torch.full((4,), 0.5),
            "step_ids": steps,
            "mc_values": torch.tensor(
                [[0.5, 0.7, 0.0], [0.5, 0.6, 0.0], [0.5, 0.3, 0.0], [0.5, 0.0, 0]]
            ),
        },
    )


def answers() -> CreditInputs:
    """One prompt, two answers, the first right; three confidences below each (rows 3 to 8).

    Brier rewards of 0.9, 0.7 and 0.5 said of the right one, of 0.8, 0.5 and 0.1 of the wrong one.
    """
    absent = float("nan")
    brier = [1 - (label - c) ** 2 for label, cs in RLCR for c in cs]
    return _placed(
        turn_rewards=torch.tensor([[1.0, absent], [0.0, absent]] + [[absent, b] for b in brier]),
        global_rewards=torch.zeros(8),
        turn_ids=torch.tensor([[1, 1, 1, 1, -1, -1, -1]] * 2 + [[-1, -1, -1, -1, -1, 2, 2]] * 6),
        group_ids=torch.tensor([0, 0, 1, 1, 1, 2, 2, 2]),
        levels=torch.tensor([0, 0] + [1] * 6),
        tree_ids=torch.zeros(8, dtype=torch.int64),
        state_ids=torch.tensor([[0, -1]] * 2 + [[-1, 1]] * 3 + [[-1, 2]] * 3),
    )


RLCR = ((1.0, (0.9, 0.7, 0.5)), (0.0, (0.8, 0.5, 0.1)))


def _placed(*, turn_rewards: torch.Tensor, **fields: Any) -> CreditInputs:
    present, mask = ~turn_rewards.isnan(), fields["turn_ids"] > 0
    placed = place_rewards(
        CreditInputs.from_rewards(
            turn_rewards, present, fields["global_rewards"], fields["turn_ids"], mask
        ),
        placement=FinalTokenOnly(),
    )
    return CreditInputs(
        named_rewards=torch.stack([turn_rewards.nanmean(dim=1), fields["global_rewards"]], dim=1),
        reward_weights=(1.0, 1.0),
        turn_rewards=turn_rewards.nan_to_num(),
        turn_present=present,
        token_rewards=placed.token_rewards,
        mask=mask,
        **fields,
    )


def example(name: str) -> CreditInputs:
    return answers() if name in OF_TREES else rollouts()


def advantages(name: str) -> torch.Tensor:
    """`[B, T]` advantages of the estimator with default options."""
    credit = bind_implementation(load_plugin("estimator", name)())(example(name))
    return credit.advantages if isinstance(credit, Credit) else credit


# Text --------------------------------------------------------------------------------------------


def document(name: str) -> str:
    """The docstring of an estimator."""
    return (
        inspect.getdoc(import_implementation(load_plugin("estimator", name).implementation)) or ""
    )


def formula(name: str) -> str:
    """The indented lines before the sections of the docstring."""
    before = re.split(r"\n(?:Args|Returns|Raises|Reference|Attributes):\n", document(name))[0]
    lines = [line[4:] for line in before.splitlines() if line.startswith("    ")]
    if not lines:
        raise ValueError(f"{name}: the docstring gives no formula")
    return "\n".join(lines)


def source(name: str) -> str:
    found = re.search(r"Reference:\n((?:    .*\n?)+)", document(name))
    if not found:
        raise ValueError(f"{name}: the docstring gives no source")
    return " ".join(found[1].split())


def page(name: str) -> str:
    """The Markdown of one estimator."""
    cls = load_plugin("estimator", name)
    inputs, values = example(name), advantages(name)
    meanings = read_field_meanings(cls)
    options = [
        f"| `{field}` | `{_format_default(info.default)}` "
        f"| {' '.join(meanings.get(field, '').split())} |"
        for field, info in cls.model_fields.items()
    ]
    lines = [
        f"# `{name}`",
        "",
        (inspect.getdoc(cls) or "").splitlines()[0],
        "",
        "```",
        formula(name),
        "```",
        "",
        f"Source: {source(name)}",
        "",
        f"It reads {READS[cls().reading()]}"
        + (
            f", and needs {', '.join(f'`{need}`' for need in sorted(cls.needs))}."
            if cls.needs
            else "."
        ),
        "",
        "```yaml",
        f"estimator: {{name: {name}}}",
        *(["critic: {learning_rate: 1e-5}"] if "values" in cls.needs else []),
        "```",
        "",
    ]
    if options:
        lines += ["| option | default | meaning |", "| --- | --- | --- |", *options, ""]
    what = answers if name in OF_TREES else rollouts
    return "\n".join(
        [
            *lines,
            "## A small example",
            "",
            " ".join((inspect.getdoc(what) or "").split()),
            "Rewards stand on the last token (`final_token_only`); hatched tokens do not learn.",
            "",
            f"![advantages of {name}]({name}.svg)",
            "",
            *_table(inputs, values),
            "",
        ]
    )


READS = {
    "scores": "one score per row",
    "turns": "the named rewards of turns and rollouts",
    "token_rewards": "rewards as placed on tokens, KL included",
}


def _format_default(default: object) -> str:
    return default.model_dump_json() if hasattr(default, "model_dump_json") else f"{default}"


def _table(inputs: CreditInputs, values: torch.Tensor) -> list[str]:
    rows = ["| row | turn rewards | global | score | advantage of each token |", "|" + " --- |" * 5]
    scores = total_scores(inputs)
    for b in range(len(values)):
        turns = ", ".join(
            f"{float(r):.3g}" if p else "–"
            for r, p in zip(inputs.turn_rewards[b], inputs.turn_present[b], strict=True)
        )
        tokens = " ".join(
            f"{float(a):+.3f}" if m else "·" for a, m in zip(values[b], inputs.mask[b], strict=True)
        )
        rows.append(
            f"| {b + 1} | {turns} | {float(inputs.global_rewards[b]):.3g} "
            f"| {float(scores[b]):.3f} | {tokens} |"
        )
    return rows


# Pictures ----------------------------------------------------------------------------------------


def picture(name: str, path: Path) -> None:
    """Draws rows of tokens, each coloured and labelled by its advantage."""
    inputs, values = example(name), advantages(name).numpy()
    mask, turns = inputs.mask.numpy(), inputs.turn_ids.numpy()
    rows, tokens = values.shape
    limit = max(float(np.abs(values).max()), 1e-6)
    norm = TwoSlopeNorm(0.0, -limit, limit)
    figure = Figure(figsize=(1.0 + 0.85 * tokens, 0.7 + 0.42 * rows), layout="constrained")
    axes = figure.add_subplot()
    for b in range(rows):
        for t in range(tokens):
            learns = mask[b, t]
            colour = mpl.colormaps["RdBu"](norm(values[b, t])) if learns else "#f4f4f4"
            hatch = None if learns else "////"
            axes.add_patch(Rectangle((t, b), 1, 1, fc=colour, ec="#cccccc", lw=0.6, hatch=hatch))
            if learns:
                dark = abs(values[b, t]) > 0.6 * limit
                axes.text(
                    t + 0.5,
                    b + 0.5,
                    f"{values[b, t]:+.2f}",
                    ha="center",
                    va="center",
                    fontsize=8,
                    color="white" if dark else "black",
                )
                axes.text(t + 0.04, b + 0.28, f"{turns[b, t]}", fontsize=5, color="#666666")
    axes.set(xlim=(0, tokens), ylim=(rows, 0), xticks=[], title=name)
    scores = total_scores(inputs)
    axes.set_yticks(np.arange(rows) + 0.5, [f"score {float(s):.2f}" for s in scores], fontsize=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    # Reproducible bytes, so that a picture changes only if its numbers do.
    with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None, "Creator": None})


def names() -> list[str]:
    return [
        found.name for found in list_installed_plugins("estimator") if found.distribution == OURS
    ]


def index() -> str:
    """The Markdown of the table of all estimators."""
    lines = [
        "# Advantage estimators",
        "",
        "Written by `make docs` from the code. Small digits in the pictures are turn numbers.",
        "[Bias](../../experiments/bias/bias.md) compares their gradients where the policy decides",
        "when to stop.",
        "",
        "| estimator | what it gives | reads | source |",
        "| --- | --- | --- | --- |",
    ]
    for name in names():
        cls = load_plugin("estimator", name)
        first = (inspect.getdoc(cls) or "").splitlines()[0]
        reads = READS[cls().reading()]
        lines.append(f"| [`{name}`]({name}.md) | {first} | {reads} | {source(name)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "README.md").write_text(index())
    for name in names():
        (FOLDER / f"{name}.md").write_text(page(name))
        picture(name, FOLDER / f"{name}.svg")
    print(f"{len(names())} pages in {FOLDER}")


if __name__ == "__main__":
    main()
