"""Renders a plan as one self-contained, escaped HTML page without scripts."""

from collections import Counter
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlx.plan.memory import DiskEstimate
from rlx.plan.report import PhaseReport, PlanReport
from rlx.plan.row_accounts import RewardAccount, RowAccount, TokenLine
from rlx.plan.synthetic_step import describe_row_kind
from rlx.text import escape_unprintable, pluralize_noun


def render_plan_page(report: PlanReport, row_numbers: Sequence[Sequence[int]]) -> str:
    """Renders the page.

    Args:
        report: the plan.
        row_numbers: for every phase, the rows whose prompts are drawn.
    """
    phases = [_list_drawn(*pair) for pair in zip(report.phases, row_numbers, strict=True)]
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


def _list_drawn(phase: PhaseReport, row_numbers: Sequence[int]) -> dict[str, Any]:
    """What the template draws of a phase: the rows of each prompt, the colour scale of each row
    level, and the bar scale."""
    numbers = dict.fromkeys(row.tree for row in phase.rows if row.row in row_numbers)
    scales = compute_level_scales(phase.rows)
    levels = {level: [row for row in phase.rows if row.level == level] for level in scales}
    scores = [0.0, *(score for group in phase.groups for score in group.scores)]
    return {
        "phase": phase,
        "trees": [[row for row in phase.rows if row.tree == number] for number in numbers],
        "scales": scales,
        "legend": [(describe_row_kind(rows), scales[level]) for level, rows in levels.items()],
        "low": min(scores),
        "high": max(scores),
    }


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


def format_memory_size(count: float) -> str:
    """Formats bytes with a readable unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def build_summary_table(title: str, *heads: str) -> Table:
    """Builds an empty table; the columns after the first are right-justified."""
    table = Table(
        box=box.SIMPLE_HEAD,
        show_edge=False,
        show_header=any(heads),
        header_style="dim",
        padding=(0, 2, 0, 0),
        title=f"\n{title}",
        title_justify="left",
        title_style="bold",
    )
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left", no_wrap=head != "scores")
    return table


SIGNS = str.maketrans({"\n": "⏎", "\t": "⇥", " ": "␣"})


NEGATIVE = ("", "red", "bold red", "bold white on red")


POSITIVE = ("", "blue", "bold blue", "bold white on blue")


_SHOWN_PROMPT = 400
"""Characters of a prompt to show."""


_NARROW_TERMINAL = 100
"""Below this terminal width, token tables omit columns that are shown elsewhere."""


def format_visible_text(text: str) -> str:
    """A token's text with visible whitespace and without control characters."""
    return escape_unprintable(text.translate(SIGNS))


def compute_heat_level(value: float, scale: float) -> int:
    """Maps |advantage| relative to `scale`, its maximum, to a colour level from 0 to 3."""
    if not value or not scale:
        return 0
    return min(3, 1 + int(3 * abs(value) / scale * 0.999))


def compute_level_scales(rows: Sequence[RowAccount]) -> dict[int, float]:
    """Largest |advantage| of each level of rows; each level has its own colour scale."""
    largest = dict.fromkeys((row.level for row in rows), 0.0)
    for row in rows:
        largest[row.level] = max([largest[row.level], *(abs(t.advantage) for t in row.tokens)])
    return largest


def show_plan(
    report: PlanReport,
    row_numbers: Sequence[Sequence[int]],
    console: Console,
    *,
    full: bool = True,
) -> None:
    """Prints a plan, its verdict first.

    Args:
        report: the plan.
        row_numbers: for every phase, the numbers of the rows to print token by token.
        console: the output console.
        full: print what follows the verdict too: rows, groups, tokens and memory.
    """
    rest = f"  {escape_unprintable(report.file)}  spec {report.digest}, seed {report.seed}"
    console.print(Text.assemble((escape_unprintable(report.name), "bold"), rest))
    console.print(_build_verdict(report))
    for note in report.notes:
        console.print(Text(f"placeholder: {escape_unprintable(note)}", "yellow"))
    if not full:
        return
    for phase, rows in zip(report.phases, row_numbers, strict=True):
        console.print()
        _show_phase(phase, rows, console)


def _build_verdict(report: PlanReport) -> Table:
    """Builds the lines: whether it can learn, what was found, what it costs."""
    table = Table.grid("", "", padding=(0, 2, 0, 0))
    table.add_row("learns", _describe_signal(report))
    counts = Counter(finding.severity for finding in report.findings)
    found = [f"{n} {what}{'s' * (n != 1)}" for what, n in sorted(counts.items())]
    style = "bold red" if counts["error"] else "bold yellow" if found else ""
    table.add_row("findings", Text(", ".join(found) + ", below" if found else "none", style))
    table.add_row("budget", _describe_budget(report))
    if report.disk is not None:
        table.add_row("disk", _describe_disk(report.disk))
    for tool in dict.fromkeys(tool for phase in report.phases for tool in phase.tools):
        schema, call, result = map(escape_unprintable, tool)
        table.add_row("tool", Text(f"{schema}\n{call} → {result}" if call else schema))
    return table


def _describe_signal(report: PlanReport) -> Text:
    """Describes in which phases some group of synthetic rollouts has an advantage."""
    if stopped := [phase for phase in report.phases if phase.stopped]:
        why = escape_unprintable(stopped[0].stopped)
        return Text(f"no: phase {_join_names(stopped[0])} assigns no credit: {why}", "bold red")
    counts = [(phase, sum(group.has_signal for group in phase.groups)) for phase in report.phases]
    silent = [_join_names(p) for p, count in counts if not count and not p.has_teacher]
    if silent:
        return Text(f"no: every advantage is 0 in phase {', '.join(silent)}", "bold red")
    groups = ", ".join(f"{_join_names(p)} {count} of {len(p.groups)}" for p, count in counts)
    text = Text.assemble(("yes", "bold green"), f": groups with advantages: {groups}")
    for phase in report.phases:
        if phase.has_teacher:
            text.append(f"; in phase {_join_names(phase)} the teacher corrects all tokens")
            continue
        kinds = {group.kind for group in phase.groups}
        for kind in sorted(kinds - {group.kind for group in phase.groups if group.has_signal}):
            what = f"; no {escape_unprintable(kind)} learns in phase {_join_names(phase)}"
            text.append(what, "bold yellow")
    return text


def _describe_budget(report: PlanReport) -> str:
    steps = sum(phase.steps for phase in report.phases)
    about, most = (
        sum(phase.steps * phase.tokens.sampled[n] for phase in report.phases) for n in (0, 1)
    )
    sizes = [phase.memory.total for phase in report.phases if phase.memory is not None]
    memory = f"about {format_memory_size(max(sizes))} per rank" if sizes else "unknown memory"
    tokens = f"{steps} step{'s' * (steps != 1)}, {about:,.0f} to {most:,.0f} sampled tokens"
    return f"{tokens}; {memory}"


def _describe_disk(disk: DiskEstimate) -> str:
    training, finished = map(format_memory_size, (disk.training, disk.finished))
    return f"{training} while training, {finished} once finished"


def _join_names(phase: PhaseReport) -> str:
    return ", ".join(map(escape_unprintable, phase.names))


def _show_phase(phase: PhaseReport, row_numbers: Sequence[int], console: Console) -> None:
    steps = "1 step" if phase.steps == 1 else f"{phase.steps} steps"
    title = f"phase {_join_names(phase)}  {steps}  {phase.schedule}  estimator {phase.estimator}"
    console.print(Text(title, "bold underline"))
    settings = " · ".join(f"{what} {value}" for what, value in phase.settings)
    console.print(Text(settings, "dim"))
    if phase.stopped:
        console.print(Text(f"no credit assigned: {escape_unprintable(phase.stopped)}", "bold red"))
    else:
        console.print(Text(f"synthetic: {', '.join(phase.made_up)}; all else is real", "dim"))
        show_rows(phase.rows, row_numbers, console)
        more = len(phase.rows) - len(row_numbers)
        if more > 0:
            console.print(Text(f"{more} more rows: --row N, or --rows all", "dim"))
        _show_groups(phase, row_numbers, console)
        _show_turn_kinds(phase, console)
        _show_missing_counts(phase, console)
    _show_token_budget(phase, console)
    _show_memory_budget(phase, console)


# Rows --------------------------------------------------------------------------------------------
def show_rows(rows: Sequence[RowAccount], row_numbers: Sequence[int], console: Console) -> None:
    """Prints rows token by token; colours are relative to all `rows` of the same level."""
    by_number = {row.row: row for row in rows}
    largest = compute_level_scales(rows)
    prompt = None
    for number in row_numbers:
        row = by_number[number]
        if row.tree != prompt:
            prompt = row.tree
            _show_prompt(row, console)
        console.print()
        console.print(_render_headline(row))
        console.print(_build_token_table(row, largest[row.level], console.width))


def _show_prompt(row: RowAccount, console: Console) -> None:
    """Prints a row's prompt and its length."""
    if row.context:
        prompt = row.context[0]
        console.print()
        text = Text.assemble((f"prompt {row.tree}", "bold"))
        text.append(f"  {escape_unprintable(row.problem)}  {prompt.tokens} tokens  ")
        text.append(escape_unprintable(prompt.text[:_SHOWN_PROMPT].replace("\n", "⏎")), "cyan")
        text.append("…" if len(prompt.text) > _SHOWN_PROMPT else "")
        console.print(text)


def _render_headline(row: RowAccount) -> Text:
    below = "" if row.parent is None else f", below row {row.parent}"
    text = Text.assemble((f"row {row.row}", "bold"), f"  {escape_unprintable(row.kind)}{below}")
    text.append(f" in turn {row.turns[-1].number}" if len(row.turns) > 1 else "")
    text.append("" if row.finish_reason == "stop" else ", cut off")
    score = "absent" if row.score is None else f"{row.score:.3f}"
    text.append("  score ").append(score, "bold")
    text.append("  mean advantage ").append(
        f"{row.advantage:+.3f}", _select_heat_style(row.advantage, 0.0)
    )
    for turn in row.turns:
        own = [reward for reward in row.rewards if reward.turn == turn.number]
        if len(row.turns) > 1:
            text.append(f"\n  turn {turn.number} {escape_unprintable(turn.kind)}", "bold")
            text.append("" if turn.finish_reason == "stop" else ", cut off")
            text.append(f"  {turn.advantage:+.3f}", _select_heat_style(turn.advantage, 0.0))
        for reward in own:
            text.append_text(
                _render_reward_line(reward, "\n    " if len(row.turns) > 1 else "\n  ")
            )
    for reward in row.rewards:
        if reward.turn is None:
            text.append_text(_render_reward_line(reward, "\n  "))
    if row.lost:
        text.append(f"\n  {row.lost:g} of reward lies on no token", "yellow")
    return text


def _render_reward_line(reward: RewardAccount, before: str) -> Text:
    raw = "absent" if reward.raw is None else f"{reward.raw:g}"
    weighed = f" × {reward.weight:g}" if reward.counts else ", not summed"
    text = Text.assemble(before, (f"{escape_unprintable(reward.name)} {raw}{weighed}", "default"))
    text.append(" for the whole rollout" if reward.turn is None else "", "dim")
    if reward.reason:
        text.append(f"  {escape_unprintable(reward.reason.splitlines()[0])}", "dim")
    return text


def _select_heat_style(value: float, scale: float) -> str:
    shades = POSITIVE if value > 0 else NEGATIVE
    return shades[compute_heat_level(value, scale) if scale else 2 * bool(value)]


def _build_token_table(row: RowAccount, scale: float, width: int) -> Table:
    names = list(dict.fromkeys(name for t in row.tokens for name in t.placed))
    narrow = width < _NARROW_TERMINAL
    apart = 52 + sum(max(8, len(name) + 2) for name in names) <= width
    optional = [
        (head, field)
        for head, field in (("KL", "kl"), ("value", "value"), ("return", "target"))
        if any(getattr(t, field) is not None for t in row.tokens)
        and not (field == "target" and row.tokens[0].value is None)
    ]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, header_style="dim", padding=(0, 1, 0, 0))
    table.add_column("#", justify="right", style="dim")
    table.add_column("turn", justify="right", style="dim")
    if not narrow:
        table.add_column("author", style="dim")
    table.add_column("token", no_wrap=True, overflow="ellipsis", min_width=6)
    table.add_column("learns")
    for name in names if apart else ["rewards"] if names else []:
        table.add_column(escape_unprintable(name), justify="right", no_wrap=apart)
    for head, _ in optional:
        table.add_column(head, justify="right")
    table.add_column("reward", justify="right")
    table.add_column("advantage", justify="right")
    if not narrow:
        table.add_column("weight", justify="right", style="dim")
    for line in row.tokens:
        style = _select_heat_style(line.advantage, scale) if line.advantage else ""
        table.add_row(
            str(line.position),
            ("env" if line.author == "environment" else "")
            if line.turn is None
            else str(line.turn),
            *([] if narrow else [line.author]),
            Text(format_visible_text(line.text), style),
            "yes" if line.learns else "·",
            *_format_placed_rewards(line, names, apart),
            *(_format_table_number(getattr(line, field)) for _, field in optional),
            _format_table_number(line.reward),
            Text(f"{line.advantage:+.3f}" if line.learns else "·", style),
            *([] if narrow else [f"{line.weight:.2g}" if line.weight else "·"]),
        )
    return table


def _format_placed_rewards(line: TokenLine, names: Sequence[str], apart: bool) -> list[str]:
    if apart:
        return [_format_table_number(line.placed.get(name, 0.0)) for name in names]
    rewards = [f"{escape_unprintable(name)} {value:+.3g}" for name, value in line.placed.items()]
    return [", ".join(rewards)] if names else []


def _format_table_number(value: float | None) -> str:
    if not value:
        return "·"
    return f"{value:+.3f}" if abs(value) >= 0.0005 else f"{value:+.0e}"


# All rows together -----------------------------------------------------------------------------
def _show_groups(phase: PhaseReport, row_numbers: Sequence[int], console: Console) -> None:
    """Prints group statistics of the prompts shown, and one line about the others."""
    trees = {row.tree for row in phase.rows if row.row in row_numbers}
    table = build_summary_table("groups", "group", "size", "scores", "mean", "σ", "advantages")
    for group in (g for g in phase.groups if g.tree in trees):
        below = f"prompt {group.tree}" if group.parent is None else f"row {group.parent}"
        scores = " ".join(f"{score:.2g}" for score in group.scores[:8])
        low, high = group.advantages
        table.add_row(
            f"{escape_unprintable(pluralize_noun(group.kind))} of {below}",
            str(len(group.rows)),
            scores + (" …" if len(group.scores) > 8 else ""),
            f"{group.mean:.3f}",
            "–" if group.std is None else f"{group.std:.3f}",
            f"{low:+.3f} to {high:+.3f}" if group.has_signal else "no signal",
        )
    console.print(table)
    silent = sum(not group.has_signal for group in phase.groups)
    console.print(Text(f"{len(phase.groups)} groups in all, {silent} without signal", "dim"))


def _show_turn_kinds(phase: PhaseReport, console: Console) -> None:
    heads = ("kind", "turns", "tokens", "learn", "of tokens", "of gradient weight")
    table = build_summary_table("what learns", *heads)
    for kind in phase.kinds:
        table.add_row(
            escape_unprintable(kind.kind),
            str(kind.turns),
            str(kind.tokens),
            str(kind.learning),
            f"{kind.share_of_tokens:.0%} {_format_share_bar(kind.share_of_tokens)}",
            f"{kind.share_of_gradient:.0%} {_format_share_bar(kind.share_of_gradient)}",
        )
    console.print(table)


def _format_share_bar(share: float) -> str:
    return ("█" * round(10 * share)).ljust(10, "░")


def _show_missing_counts(phase: PhaseReport, console: Console) -> None:
    counts = phase.counts
    if counts is None:
        return
    losses = [
        (counts.dropped, "rows dropped because they could not be scored"),
        (counts.turns_without_tokens, "rewarded turns without a token that learns"),
        (counts.rows_without_spans, "rows without any of their spans"),
        (counts.rows_without_learning, "rows in which nothing learns"),
    ]
    made = counts.rows + counts.dropped
    losses.append((counts.unfinished, "rollouts that the environment had not ended"))
    lines = [f"{count} of {made} {what}" for count, what in losses if count]
    if counts.reward_lost:
        lines.append(f"{counts.reward_lost:g} of {counts.reward_given:g} reward placed on no token")
    console.print(Text("; ".join(lines) or "nothing was lost", "dim"))


def _show_token_budget(phase: PhaseReport, console: Console) -> None:
    budget = phase.tokens
    table = build_summary_table("tokens per step", "", "turns", "opening", "synthetic", "at most")
    for level in budget.levels:
        numbers = (f"{level.turns:,}", f"{level.opening:.0f}", f"{level.made_up:.0f}")
        table.add_row(escape_unprintable(level.kind), *numbers, f"{level.at_most:,}")
    for what, pair in (
        ("written by the policy", budget.sampled),
        ("rows, each with its context", budget.rows),
        ("prefixes shared, as the learner does", budget.shared),
    ):
        table.add_row(what, "", "", *(f"{value:,.0f}" for value in pair))
    console.print(table)


def _show_memory_budget(phase: PhaseReport, console: Console) -> None:
    if phase.memory is None:
        message = "memory per step: unknown, since the model's configuration is not on this machine"
        console.print(Text(message, "dim"))
        return
    memory = phase.memory
    parameters = _format_parameter_count(memory.parameters)
    table = build_summary_table(f"memory per rank, {parameters} parameters", "", "")
    for what, count in memory.parts.items():
        table.add_row(what, "about " * (what in memory.estimated) + format_memory_size(count))
    for stage, count in memory.stage_totals.items():
        style = "bold" * (stage == memory.largest_stage)
        table.add_row(f"at the peak of {stage}", f"about {format_memory_size(count)}", style=style)
    for size, share in phase.gpus.items():
        verdict = "fits" if share <= phase.gpu_room else "too little"
        table.add_row(f"of a GPU of {size}", f"{share:.0%}, {verdict}")
    console.print(table)


def _format_parameter_count(parameters: int) -> str:
    for unit, step in (("B", 1e9), ("M", 1e6)):
        if parameters >= step:
            return f"{parameters / step:.3g} {unit}"
    return f"{parameters:,}"
