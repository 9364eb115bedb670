"""`rlx samples`: the rollouts of a step with their rewards, as tables or JSON Lines."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlx.cli.output import format_json, print_json, print_text
from rlx.cli.verb_group import json_option, registry_option
from rlx.errors import SpecError
from rlx.launch import locate_run_folder, open_registry
from rlx.results import load_step_accounts, select_rollout_steps
from rlx.text import escape_unprintable, explain_write_errors
from rlx_registry import (
    BodyRecord,
    RolloutIndex,
    RunRecord,
    TreeRecord,
    get_model_text,
    list_path_segments,
    read_body,
    read_trees,
)

if TYPE_CHECKING:
    from rlx.record import StoredStep  # brings torch
    from rlx.reward import RewardEntry
    from rlx.rollout import Segment

ROWS_ON_SCREEN = 20


@click.command()
@click.argument("run", default="latest")
@click.option("--step", type=click.IntRange(min=1), help="By default the last one.")
@click.option("--group", "tree", type=int, help="Only this prompt (column TREE).")
@click.option(
    "-n", "--limit", type=click.IntRange(min=1),
    help=f"Maximum number of rows: {ROWS_ON_SCREEN}, or all with --export.",
)  # fmt: skip
@click.option("--whole", is_flag=True, help="Show prompts, turns and observations in full.")
@click.option("--credit", is_flag=True, help="Show rewards, KL and advantages per token.")
@click.option("--row", "numbers", type=int, multiple=True, help="With --credit: only this row.")
@click.option(
    "--export", "file", type=click.Path(path_type=Path, allow_dash=True), metavar="FILE",
    help="Write the rows with all their tokens as JSON Lines; `-` is stdout.",
)  # fmt: skip
@json_option
@registry_option
def samples(
    run: str,
    step: int | None,
    tree: int | None,
    limit: int | None,
    whole: bool,
    credit: bool,
    numbers: tuple[int, ...],
    file: Path | None,
    as_json: bool,
    url: str,
) -> None:
    """Show RUN's rollouts: prompts, then turns with their reward components and advantages."""
    if numbers and not credit:
        raise SpecError("--row N shows a row token by token: add --credit")
    if file is not None and (credit or as_json):
        raise SpecError(
            "--export writes every row with its tokens, as JSON Lines: drop --json and --credit"
        )
    with open_registry(url) as registry:
        found = registry.run(run)
        at = select_rollout_steps(registry, found, () if step is None else (step,))[-1]
        rows = registry.results.rollout_index(found.id, at)
        body = registry.results.rollout_body(found.id, at)
    if tree is not None and not any(row.tree == tree for row in rows):
        there = f"; it has 0 to {max(row.tree for row in rows)}" if rows else ""
        raise SpecError(f"step {at} of {found.id} has no prompt {tree}{there}")
    rows = [row for row in rows if tree is None or row.tree == tree]
    if credit:
        return _show_credit_rows(found, at, body, {row.row for row in rows}, numbers, as_json)
    # Each answer stands before its confidences.
    rows.sort(key=lambda r: (r.tree, r.row if r.parent_row is None else r.parent_row, r.row))
    if file is not None:
        return _write_rollout_rows(found, at, body, [row.row for row in rows[:limit]], file)
    rows, count = rows[: limit or ROWS_ON_SCREEN], len(rows)
    if as_json:
        names = RolloutIndex.__slots__
        return print_json(
            [{"run": found.id, "step": at, **{n: getattr(row, n) for n in names}} for row in rows]
        )
    print_text(f"{found.id} step {at}: {count} rows")
    path = locate_run_folder(found).root / body.path
    trees = read_trees(path, body.sha256, {row.tree for row in rows})
    return _show_samples(rows, {tree["tree"]: tree for tree in trees}, whole=whole)


def _write_rollout_rows(
    run: RunRecord, step: int, body: BodyRecord, rows: Sequence[int], file: Path
) -> None:
    from rlx.home import format_path
    from rlx.record import read_step

    table = read_body(locate_run_folder(run).root / body.path, body.sha256)
    stored = read_step(table)
    about = {"run": run.id, "step": step, "phase": body.statistics["phase"]}
    pieces = table["pieces"].to_pylist()  # the texts of tokens, by tree and segment
    lines = (
        format_json({**about, **_build_row_json(stored, row, pieces[stored.rows.places[row][0]])})
        for row in rows
    )
    if str(file) == "-":
        for line in lines:
            print_text(line)
        return
    with explain_write_errors(file), file.open("w", encoding="ascii") as out:
        out.writelines(f"{line}\n" for line in lines)
    print_text(
        f"{len(rows)} rows of step {step} of {run.id}: {escape_unprintable(format_path(file))}",
        err=True,
    )


def _show_credit_rows(
    run: RunRecord,
    step: int,
    body: BodyRecord,
    there: set[int],
    numbers: Sequence[int],
    as_json: bool,
) -> None:
    """Prints the per-token credit of rows of a step, as `rlx plan` does: of those with the
    `numbers`, which must be `there`; without numbers of examples, or as JSON of all."""
    from rlx.cli.console import open_console
    from rlx.plan import convert_to_json, select_example_rows, show_rows

    if missing := sorted(set(numbers) - there):
        raise SpecError(f"--row {missing[0]}: step {step} of {run.id} has no such row here")
    found, phase = load_step_accounts(run, body), str(body.statistics["phase"])
    accounts = found.rows
    selected = numbers or select_example_rows(
        [a for a in accounts if a.row in there], found.spec.evaluation.correct
    )
    unread = "the run's tokenizer is not on this machine: token ids are shown"
    note = "" if found.decoded else unread
    if as_json:
        rows = [convert_to_json(a) for a in accounts if a.row in (set(numbers) or there)]
        return print_json({"run": run.id, "step": step, "phase": phase, "note": note, "rows": rows})
    print_text(f"{run.id} step {step}, phase {escape_unprintable(phase)}: {len(accounts)} rows")
    if note:
        print_text(note, err=True)
    return show_rows(accounts, selected, open_console())


def _show_samples(
    rows: Sequence[RolloutIndex], trees: Mapping[int, TreeRecord], *, whole: bool
) -> None:
    """Prints the prompts of rows as the model read them, then the rows."""
    from rich.table import Column

    from rlx.cli.tables import print_table

    def shorten(text: str, begin: int, end: int) -> str:
        line = escape_unprintable(text.replace("\n", "⏎"))
        if whole or len(line) <= begin + end:
            return line
        return f"{line[:begin]} … {line[-end:]}" if end else f"{line[:begin]}…"

    # A long prompt keeps its end, where the problem is.
    prompts = [(str(n), shorten(get_model_text(tree, 0), 80, 160)) for n, tree in trees.items()]
    if prompts:
        print_table("TREE", "PROMPT", rows=prompts)
        print_text("")
    texts = {
        row["row"]: _join_turns(tree, row["segment"], {r["segment"] for r in tree["rows"]})
        if whole
        else tree["segments"][row["segment"]]["text"]
        for tree in trees.values()
        for row in tree["rows"]
    }
    cells = []
    for row in rows:
        parts = " ".join(
            f"{name}={'absent' if value is None else f'{value:g}'}"
            for name, value in row.rewards.items()
        )
        cells.append(
            (
                str(row.row),
                str(row.tree),
                ("  " if row.parent_row is not None else "") + escape_unprintable(row.turn),
                "absent" if row.reward is None else f"{row.reward:.3f}",
                f"{row.advantage:+.3f}",
                escape_unprintable(parts + (f"  ({row.failed})" if row.failed else "")),
                shorten(texts.get(row.row, row.preview), 70, 0),
            )
        )
    heads = [Column(head, no_wrap=True) for head in ("ROW", "TREE", "TURN", "REWARD", "ADVANTAGE")]
    print_table(*heads, "PARTS", "TEXT", rows=cells)


def _join_turns(tree: TreeRecord, last: int, ends: Collection[int]) -> str:
    """The turns of a row that ends with segment `last`, each after what was read before it; a row
    that continues another begins after that one's end."""
    path = list_path_segments(tree, last)[1:]
    begin = max((n for n, s in enumerate(path[:-1], 1) if s in ends), default=0)
    own = [(s, tree["segments"][s]) for s in path[begin:]]
    if sum(segment["author"] == "policy" for _, segment in own) == 1:
        return own[-1][1]["text"]
    return "\n".join(
        f"[{segment['kind']}] {segment['text']}"
        if segment["author"] == "policy"
        else f"[{segment['author']}] {get_model_text(tree, s)}"
        for s, segment in own
    )


def _build_row_json(
    stored: "StoredStep", number: int, texts: Sequence[Sequence[str]] | None
) -> dict[str, Any]:
    """The JSON object of a trained row, with the fields of KG-R1, arXiv 2509.26383.

    P tokens precede the row's first own token and R follow; nothing is padded. The lists are
    `prompt_ids` [P]; `response_ids`, `turn_sequence`, `loss_mask`, `effective_mask`, `advantages`,
    `behaviour_logprobs` and `old_logprobs` [R]; `attention_mask` and `info_mask` [P + R].
    `turn_sequence` is the turn number on policy tokens and -1 on others. `loss_mask` is 1 on policy
    tokens, `effective_mask` 1 on tokens that enter the loss. Log-probabilities, in nats, are the
    sampler's and those of the loss's denominator; null on tokens of others.

    `prompt` is what was asked last. `input` is all that the model had read before its first own
    token; null in files without texts of tokens. `turn_reward_components` sum to `turn_rewards`,
    which lack turns without rewards. Names that begin with `_` are never summed; `_raw_NAME` is
    NAME without its weight. An absent reward is null.
    """
    at, segment, parent, kind, _ = stored.rows.places[number]
    tree, places = stored.trees[at], [place[:2] for place in stored.rows.places]
    own, _ = tree.own_turns(segment)
    path = tree.path(segment)
    first = path.index(own[0])
    turns = [(index, tree.segments[index]) for index in own]
    observations = [s for s in tree.segments if s.author == "environment"]
    totals = {str(turn.turn): stored.rewards.get_turn_total((at, index)) for index, turn in turns}
    return {
        "row": number,
        "parent_row": places.index((at, parent)) if (at, parent) in places else None,
        "tree": at,
        "group": int(stored.rows.groups[number]),
        "kind": kind,
        "problem_id": tree.problem.id,
        "problem": dict(tree.problem.fields),
        "prompt": _join_prompt([tree.segments[index] for index in path[:first]]),
        "input": None if texts is None else "".join("".join(texts[s]) for s in path[:first]),
        "turns": [
            {
                "turn": turn.turn,
                "kind": turn.kind,
                "response": turn.text,
                "observation": next((s.text for s in observations if s.parent == index), None),
                "info": dict(turn.info),
                "finish_reason": turn.finish_reason,
            }
            for index, turn in turns
        ],
        "structured_rewards": {
            "turn_rewards": {turn: total for turn, total in totals.items() if total is not None},
            "turn_reward_components": {
                str(turn.turn): _collect_reward_values(stored.rewards.turns.get((at, index), {}))
                for index, turn in turns
            },
            "global_rewards": _collect_reward_values(
                stored.rewards.rollouts.get((at, own[-1]), {})
            ),
        },
        "scores": stored.rows.get_row_scores(number),
        **_build_tokens_json(stored, number, path[:first], path[first:], own),
    }


def _join_prompt(before: "Sequence[Segment]") -> str:
    """The last prompt before a turn, and what an environment added to it (self-play)."""
    text = ""
    for segment in before:
        text = segment.text if segment.author != "environment" else text + segment.text
    return text


def _collect_reward_values(entries: "Mapping[str, RewardEntry]") -> dict[str, float | None]:
    """Weighted values, then the raw values of the rewards that are summed."""
    weighted = {
        e.name: e.raw if e.raw is None or not e.is_summed else e.weight * e.raw
        for e in entries.values()
    }
    return weighted | {f"_raw_{e.name}": e.raw for e in entries.values() if e.is_summed}


def _build_tokens_json(
    stored: "StoredStep",
    number: int,
    before: Sequence[int],
    after: Sequence[int],
    own: Sequence[int],
) -> dict[str, Any]:
    """The per-token lists; `before` is the path of the prompt, `after` of the response."""
    segments = stored.trees[stored.rows.places[number][0]].segments
    prompt = [token for s in before for token in segments[s].token_ids]
    response = [token for s in after for token in segments[s].token_ids]
    turn_of = {s: segments[s].turn if s in own else -1 for s in after}
    turns = [turn_of[s] for s in after for _ in segments[s].token_ids]
    policy = [int(turn != -1) for turn in turns]
    here = slice(len(prompt), len(prompt) + len(response))
    names = ("mask", "advantages", "old_logprobs")
    mask, advantages, old = (stored.rows.tokens[name] for name in names)
    sampled = [
        p for s in after for p in segments[s].logprobs or [None] * len(segments[s].token_ids)
    ]
    return {
        "prompt_ids": prompt,
        "response_ids": response,
        "turn_sequence": turns,
        "attention_mask": [1] * (len(prompt) + len(response)),
        "info_mask": [1] * len(prompt) + policy,
        "loss_mask": policy,
        "effective_mask": None if mask is None else mask[number, here].int().tolist(),
        "advantages": None if advantages is None else advantages[number, here].tolist(),
        "behaviour_logprobs": sampled,
        "old_logprobs": None
        if old is None
        else [v if p else None for v, p in zip(old[number, here].tolist(), policy, strict=True)],
    }
