"""Renders a plan as one self-contained, escaped HTML page without scripts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from jinja2 import Environment, StrictUndefined, Template

from rlx.plan.report import GroupStatistics, PhaseReport, PlanReport
from rlx.plan.row_accounts import RowAccount, TokenLine
from rlx.plan.text import compute_level_scales, format_memory_size
from rlx.plan.trial import describe_row_kind
from rlx.text import escape_unprintable


@dataclass(frozen=True, slots=True)
class Branch:
    """A row and the rows that continue it; `question` is the text between them."""

    row: RowAccount
    question: str
    below: tuple["Branch", ...]


@dataclass(frozen=True, slots=True)
class PromptTree:
    """A prompt and the synthetic rows below it."""

    number: int
    problem: str
    prompt: str
    branches: tuple[Branch, ...]
    groups: tuple[GroupStatistics, ...]


@dataclass(frozen=True, slots=True)
class PhasePage:
    """A phase, the prompts to draw, the colour scale of each row level, and the bar scale."""

    phase: PhaseReport
    trees: tuple[PromptTree, ...]
    scales: Mapping[int, float]
    legend: Sequence[tuple[str, float]]
    low: float
    high: float


def render_plan_page(report: PlanReport, row_numbers: Sequence[Sequence[int]]) -> str:
    """Renders the page.

    Args:
        report: the plan.
        row_numbers: for every phase, the rows whose prompts are drawn.
    """
    phases = [_build_phase_page(*pair) for pair in zip(report.phases, row_numbers, strict=True)]
    return _load_template().render(report=report, phases=phases)


@cache
def _load_template() -> Template:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "visible": _render_page_text,
        "token_title": _format_token_title,
        "size": format_memory_size,
        "safe_text": escape_unprintable,
        "zip": lambda one, other: list(zip(one, other, strict=True)),
    }
    return environment.from_string(files("rlx.plan").joinpath("page.html").read_text("utf-8"))


def _build_phase_page(phase: PhaseReport, row_numbers: Sequence[int]) -> PhasePage:
    trees = dict.fromkeys(row.tree for row in phase.rows if row.row in row_numbers)
    largest = compute_level_scales(phase.rows)
    levels = {level: [row for row in phase.rows if row.level == level] for level in largest}
    scores = [0.0, *(score for group in phase.groups for score in group.scores)]
    return PhasePage(
        phase=phase,
        trees=tuple(_build_page_tree(phase, number) for number in trees),
        scales=largest,
        legend=[(describe_row_kind(rows), largest[level]) for level, rows in levels.items()],
        low=min(scores),
        high=max(scores),
    )


def _build_page_tree(phase: PhaseReport, number: int) -> PromptTree:
    rows = [row for row in phase.rows if row.tree == number]
    first = rows[0]
    return PromptTree(
        number=number,
        problem=first.problem,
        prompt=first.context[0].text if first.context else "",
        branches=_build_branches(rows, None),
        groups=tuple(group for group in phase.groups if group.tree == number),
    )


def _build_branches(rows: Sequence[RowAccount], parent: int | None) -> tuple[Branch, ...]:
    """Builds the branches below `parent`; rows whose parent is not listed become roots."""
    there = {row.row for row in rows}
    return tuple(
        Branch(
            row=row,
            question=row.context[-1].text if row.level and row.context else "",
            below=_build_branches(rows, row.row),
        )
        for row in rows
        if row.parent == parent or (parent is None and row.parent not in there)
    )


def _render_page_text(text: str) -> str:
    """A token's text with visible line ends and tabs; its box makes spaces visible."""
    return "".join(
        "⏎\n" if c == "\n" else "⇥" if c == "\t" else escape_unprintable(c) for c in text
    )


def _format_token_title(line: TokenLine) -> str:
    """All figures of a token, for its tooltip."""
    figures = [f"#{line.position}  {escape_unprintable(repr(line.text))}  id {line.token}"]
    figures.append(f"{line.author}" + ("" if line.turn is None else f", turn {line.turn}"))
    figures.append("learns" if line.learns else "does not learn")
    figures += [f"{name} {value:+.6g}" for name, value in line.placed.items()]
    for what, value in (
        ("KL", line.kl),
        ("reward", line.reward),
        ("advantage", line.advantage),
        ("weight", line.weight),
        ("old log-probability", line.old_logprob),
        ("reference log-probability", line.reference_logprob),
        ("value", line.value),
        ("return", line.target if line.value is not None else None),
    ):
        if value is not None:
            figures.append(f"{what} {value:+.6g}")
    return "\n".join(figures)
