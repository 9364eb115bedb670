"""Prints plans, and rows token by token, as tables for a terminal."""

from collections import Counter
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlx.launch import format_disk_space
from rlx.plan.memory import ESTIMATED
from rlx.plan.report import PhaseReport, PlanReport
from rlx.plan.row_accounts import RewardAccount, RowAccount
from rlx.text import escape_unprintable, pluralize_noun

_SIGNS = str.maketrans({"\n": "⏎", "\t": "⇥", " ": "␣"})
_SHOWN_PROMPT = 400
"""Characters of a prompt to show."""


def show_plan(report: PlanReport, console: Console, *, full: bool) -> None:
    """Prints a plan, its verdict first; a `full` one with rows, groups, tokens and memory."""
    rest = f"  {escape_unprintable(report.file)}  spec {report.digest}, seed {report.seed}"
    console.print(Text.assemble((escape_unprintable(report.name), "bold"), rest))
    console.print(_build_verdict(report))
    for note in report.notes:
        console.print(Text(f"placeholder: {escape_unprintable(note)}", "yellow"))
    for phase in report.phases if full else ():
        console.print()
        _show_phase(phase, console)


def _build_verdict(report: PlanReport) -> Table:
    table = Table.grid("", "", padding=(0, 2, 0, 0))
    table.add_row("learns", _describe_signal(report))
    counts = Counter(finding.severity for finding in report.findings)
    found = [f"{n} {what}{'s' * (n != 1)}" for what, n in sorted(counts.items())]
    style = "bold red" if counts["error"] else "bold yellow" if found else ""
    table.add_row("findings", Text(", ".join(found) + ", below" if found else "none", style))
    steps = sum(phase.steps for phase in report.phases)
    about, most = (
        sum(phase.steps * phase.tokens.sampled[n] for phase in report.phases) for n in (0, 1)
    )
    sizes = [phase.memory.total for phase in report.phases if phase.memory is not None]
    memory = f"about {format_disk_space(max(sizes))} per rank" if sizes else "unknown memory"
    tokens = f"{steps} step{'s' * (steps != 1)}, {about:,.0f} to {most:,.0f} sampled tokens"
    table.add_row("budget", f"{tokens}; {memory}")
    if report.disk is not None:
        training, finished = map(format_disk_space, (report.disk.training, report.disk.finished))
        table.add_row("disk", f"{training} while training, {finished} once finished")
    for tool in dict.fromkeys(tool for phase in report.phases for tool in phase.tools):
        schema, call, result = map(escape_unprintable, tool)
        table.add_row("tool", Text(f"{schema}\n{call} → {result}" if call else schema))
    return table


def _describe_signal(report: PlanReport) -> Text:
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


def _join_names(phase: PhaseReport) -> str:
    return ", ".join(map(escape_unprintable, phase.names))


def _show_phase(phase: PhaseReport, console: Console) -> None:
    steps = "1 step" if phase.steps == 1 else f"{phase.steps} steps"
    title = f"phase {_join_names(phase)}  {steps}  {phase.schedule}  estimator {phase.estimator}"
    console.print(Text(title, "bold underline"))
    if phase.stopped:
        console.print(Text(f"no credit assigned: {escape_unprintable(phase.stopped)}", "bold red"))
    else:
        console.print(Text(f"synthetic: {', '.join(phase.made_up)}; all else is real", "dim"))
        show_rows(phase.rows, phase.shown, console)
        if (more := len(phase.rows) - len(phase.shown)) > 0:
            console.print(Text(f"{more} more rows: --json", "dim"))
        _show_groups(phase, console)
    _show_budgets(phase, console)


# Rows --------------------------------------------------------------------------------------------
def show_rows(rows: Sequence[RowAccount], row_numbers: Sequence[int], console: Console) -> None:
    """Prints rows token by token."""
    by_number = {row.row: row for row in rows}
    tree = None
    for row in (by_number[number] for number in row_numbers):
        if row.tree != tree and row.context:
            prompt = row.context[0]
            text = Text.assemble("\n", (f"prompt {row.tree}", "bold"))
            text.append(f"  {escape_unprintable(row.problem)}  {prompt.tokens} tokens  ")
            text.append(escape_unprintable(prompt.text[:_SHOWN_PROMPT].replace("\n", "⏎")), "cyan")
            text.append("…" if len(prompt.text) > _SHOWN_PROMPT else "")
            console.print(text)
        tree = row.tree
        console.print()
        console.print(_render_headline(row))
        console.print(_build_token_table(row))


def _render_headline(row: RowAccount) -> Text:
    below = "" if row.parent is None else f", below row {row.parent}"
    text = Text.assemble((f"row {row.row}", "bold"), f"  {escape_unprintable(row.kind)}{below}")
    several = len(row.turns) > 1
    text.append(f" in turn {row.turns[-1].number}" if several else "")
    text.append("" if row.finish_reason == "stop" else ", cut off")
    text.append("  score ").append("absent" if row.score is None else f"{row.score:.3f}", "bold")
    text.append("  mean advantage ").append(f"{row.advantage:+.3f}", _get_style(row.advantage))
    for turn in row.turns:
        if several:
            text.append(f"\n  turn {turn.number} {escape_unprintable(turn.kind)}", "bold")
            text.append("" if turn.finish_reason == "stop" else ", cut off")
            text.append(f"  {turn.advantage:+.3f}", _get_style(turn.advantage))
        for reward in row.rewards:
            if reward.turn == turn.number:
                text.append_text(_render_reward_line(reward, "\n    " if several else "\n  "))
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


def _get_style(advantage: float) -> str:
    return ("bold blue" if advantage > 0 else "bold red") if advantage else ""


def _build_token_table(row: RowAccount) -> Table:
    fields = {"KL": "kl"}
    if row.tokens and row.tokens[0].value is not None:
        fields |= {"value": "value", "return": "target"}
    there = {
        field for field in fields.values() for t in row.tokens if getattr(t, field) is not None
    }
    optional = {head: field for head, field in fields.items() if field in there}
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, header_style="dim", padding=(0, 1, 0, 0))
    table.add_column("#", justify="right", style="dim")
    table.add_column("turn", justify="right", style="dim")
    table.add_column("token", no_wrap=True, overflow="ellipsis", min_width=6)
    for head in ("rewards", *optional, "reward", "advantage", "weight"):
        table.add_column(head, justify="right")
    for line in row.tokens:
        style = _get_style(line.advantage)
        turn = "env" if line.author == "environment" else ""
        placed = (f"{escape_unprintable(name)} {v:+.3g}" for name, v in line.placed.items())
        table.add_row(
            str(line.position),
            turn if line.turn is None else str(line.turn),
            Text(escape_unprintable(line.text.translate(_SIGNS)), style),
            ", ".join(placed),
            *(_format_number(getattr(line, field)) for field in optional.values()),
            _format_number(line.reward),
            Text(f"{line.advantage:+.3f}" if line.learns else "·", style),
            f"{line.weight:.2g}" if line.weight else "·",
        )
    return table


def _format_number(value: float | None) -> str:
    if not value:
        return "·"
    return f"{value:+.3f}" if abs(value) >= 0.0005 else f"{value:+.0e}"


# All rows together -----------------------------------------------------------------------------
def _build_summary_table(title: str, *heads: str) -> Table:
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


def _show_groups(phase: PhaseReport, console: Console) -> None:
    trees = {row.tree for row in phase.rows if row.row in phase.shown}
    table = _build_summary_table("groups", "group", "size", "scores", "mean", "σ", "advantages")
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


def _show_budgets(phase: PhaseReport, console: Console) -> None:
    heads = ("", "turns", "opening", "synthetic", "at most")
    table = _build_summary_table("tokens per step", *heads)
    for level in phase.tokens.levels:
        numbers = (f"{level.turns:,}", f"{level.opening:.0f}", f"{level.made_up:.0f}")
        table.add_row(escape_unprintable(level.kind), *numbers, f"{level.at_most:,}")
    for what, pair in (
        ("written by the policy", phase.tokens.sampled),
        ("prefixes shared, as the learner does", phase.tokens.shared),
    ):
        table.add_row(what, "", "", *(f"{value:,.0f}" for value in pair))
    console.print(table)
    memory = phase.memory
    if memory is None:
        message = "memory per step: unknown, since the model's configuration is not on this machine"
        console.print(Text(message, "dim"))
        return
    scale, unit = (1e9, "B") if memory.parameters >= 1e9 else (1e6, "M")
    count = f"{memory.parameters / scale:.3g} {unit}"
    table = _build_summary_table(f"memory per rank, {count} parameters", "", "")
    for what, size in memory.parts.items():
        table.add_row(what, "about " * (what in ESTIMATED) + format_disk_space(size))
    for stage, size in memory.stage_totals.items():
        style = "bold" * (stage == memory.largest_stage)
        table.add_row(f"at the peak of {stage}", f"about {format_disk_space(size)}", style=style)
    for card, share in phase.gpus.items():
        verdict = "fits" if share <= phase.gpu_room else "too little"
        table.add_row(f"of a GPU of {card}", f"{share:.0%}, {verdict}")
    console.print(table)
