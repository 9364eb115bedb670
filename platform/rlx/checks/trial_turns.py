"""Checks the turns of an experiment: templates, token budgets, spans, and its environment."""

import re
from collections.abc import Iterator, Sequence

from rlx.rollout import EnvironmentPlan, Segment, TurnLevel
from rlx.spec import EnvironmentRolloutSpec, KeyPath, TinyModelSpec
from rlx.spec.reading import Diagnostic, build_error, build_warning, format_key_path
from rlx.text import escape_unprintable
from rlx.trial import Place, PlanTrial, token_budget

__all__ = ["build_plugin_fault", "check_trial_environment", "check_turn_level", "format_quote"]

TRAILING = re.compile(r"<([A-Za-z_][\w-]*)>\s*$")
"""A tag at the end of a template, declared as a span or not: rewards look for such tags too."""
SHOWN = 160
"""Characters of a response that a message quotes."""
LONGEST = 300
"""Maximum characters of a plugin's own message."""


def check_turn_level(trial: PlanTrial, level: TurnLevel, *, is_first: bool) -> Iterator[Diagnostic]:
    """Yields findings about one kind of turn."""
    path: KeyPath = ("rollout", level.kind)
    turns = [s for tree in trial.trees for s in tree.segments if _is_level_turn(trial, level, s)]
    yield from _check_template_tags(
        (*path, "template"), level.turn.template, level.turn.spans, is_first
    )
    cut = list(_check_token_limit(trial, path, level.turn.max_new_tokens, turns))
    yield from cut
    if not cut and level.turn.spans and turns and not any(s.spans for s in turns):
        yield build_warning(
            (*path, "spans"),
            f"no synthetic {level.kind} has any of the spans {', '.join(level.turn.spans)}",
            "use the tags of the task's demonstrations, or have the prompt ask for these",
        )


def _is_level_turn(trial: PlanTrial, level: TurnLevel, segment: Segment) -> bool:
    """Whether a segment is a turn sampled at this level."""
    talk = trial.recipe.plan.talk
    if talk is None:
        return segment.kind == level.kind
    return segment.author == "policy" and talk.sampling(segment.turn) == level.turn


def _check_template_tags(
    path: KeyPath, template: str, spans: Sequence[str], is_first: bool
) -> Iterator[Diagnostic]:
    """Reports span tags that the template opens without closing, or closes without opening."""
    label = format_key_path(path)
    last = TRAILING.search(template)
    for name in dict.fromkeys((*spans, *((last[1],) if last else ()))):
        opened, closed = template.count(f"<{name}>"), template.count(f"</{name}>")
        if opened > closed and not (is_first and name == "think"):
            ends_so = template.rstrip().endswith(f"<{name}>")
            what = "ends with" if ends_so else "opens"
            yield (build_error if ends_so else build_warning)(
                path,
                f"{label} {what} <{name}> and never closes it: the generated text then has no "
                f"<{name}> of its own, so its span {name!r} is not found",
                f"let the model write <{name}> itself, or close it in the template",
            )
        elif closed > opened:
            yield build_warning(
                path,
                f"{label} closes <{name}>, which it never opened",
                f"write <{name}> before </{name}>, or omit both",
            )


def _check_token_limit(
    trial: PlanTrial, path: KeyPath, budget: int, turns: Sequence[Segment]
) -> Iterator[Diagnostic]:
    """Reports turns that often exceed their budget: over half, or over a tenth if scripted."""
    cut = sum(s.finish_reason == "length" for s in turns)
    if trial.is_scripted:
        cut = sum(s.finish_reason == "length" and len(s.token_ids) == budget for s in turns)
    if cut > len(turns) * (0.1 if trial.is_scripted else 0.5):
        at = (*path, "max_new_tokens")
        yield build_warning(
            at,
            f"{format_key_path(at)} is {budget}, and {cut} of {len(turns)} synthetic "
            f"{path[-1]}s need more",
            "give the turn room for all of its spans and the token that ends it",
        )


# Environments ----------------------------------------------------------------------------------


def check_trial_environment(
    trial: PlanTrial, talk: EnvironmentPlan, *, stand_ins: bool
) -> Iterator[Diagnostic]:
    """Yields findings about rollouts with an environment, its own failures first."""
    forced = talk.forced_answer
    if forced is not None:
        path: KeyPath = ("rollout", "forced_answer")
        yield from _check_template_tags(
            (*path, "template"), forced.template, talk.turn.spans, False
        )
    if trial.faults:
        yield _build_environment_diagnostic(trial, stand_ins)
        return
    if forced is not None and forced.max_new_tokens is not None:
        last = [s for tree in trial.trees for s in tree.segments if s.turn == talk.last]
        yield from _check_token_limit(trial, path, forced.max_new_tokens, last)
    yield from _check_rollout_length(trial, talk)
    yield from _check_turn_limit(trial, talk)


def _build_environment_diagnostic(trial: PlanTrial, stand_ins: bool) -> Diagnostic:
    """The first failure of the environment, with the turn that caused it."""
    use = trial.recipe.spec.rollout
    name = use.environment.plugin if isinstance(use, EnvironmentRolloutSpec) else ""
    (tree, at), why = next(iter(trial.faults.items()))
    segment = trial.trees[tree].segments[at]
    plugin_input = f"its input: turn {segment.turn}: {format_quote(segment.text)}"
    if segment.author == "prompt":
        problem = trial.trees[tree].problem.id
        plugin_input = f"its input: the start of problem {problem}: {format_quote(segment.text)}"
    return build_plugin_fault(
        f"environment plugin {name!r}",
        why,
        plugin_input,
        path=("rollout", "environment"),
        handled="continue without the rollout",
        lenient=isinstance(use, EnvironmentRolloutSpec) and use.environment.on_error != "fail",
        stand_ins=stand_ins,
    )


def _check_rollout_length(trial: PlanTrial, talk: EnvironmentPlan) -> Iterator[Diagnostic]:
    """Reports rollouts that exceed the model's context length, or may exceed it."""
    room = trial.shape and trial.shape.positions
    ended = sum(_get_turn_number(trial, place) < talk.last for place in trial.unfinished_turns)
    tokens = token_budget(trial)
    if not room or (tokens.longest <= room and not ended):
        return
    first, *later = tokens.levels
    may_take = (
        f"rollouts may take {tokens.longest:.0f} (prompt {first.opening:.0f}, turns "
        f"{sum(level.at_most for level in tokens.levels)}, synthetic observations "
        f"{sum(level.opening for level in later):.0f})"
    )
    message = f"the model holds {room} tokens, and {may_take}: longer ones end early"
    if ended:
        message = (
            f"{ended} of {_count_rollouts(trial)} synthetic rollouts exceed the {room} tokens "
            f"that the model holds, and end early; {may_take}"
        )
    tiny = isinstance(trial.recipe.spec.model, TinyModelSpec)
    yield build_warning(
        ("model", "max_position") if tiny else ("rollout", "max_turns"),
        message,
        "shorten observations, allow fewer turns or smaller `max_new_tokens`",
        against=("rollout", "max_turns"),
    )


def _check_turn_limit(trial: PlanTrial, talk: EnvironmentPlan) -> Iterator[Diagnostic]:
    """Reports scripted rollouts most of which reach the turn limit without finishing."""
    undone = sum(_get_turn_number(trial, place) == talk.last for place in trial.unfinished_turns)
    if trial.is_scripted and 2 * undone > _count_rollouts(trial):
        after = "the forced answer" if talk.forced_answer else f"{talk.max_turns} turns"
        yield build_warning(
            ("rollout", "max_turns"),
            f"{undone} of {_count_rollouts(trial)} synthetic rollouts are not done after {after}",
            "raise it" if talk.forced_answer else "raise it, or add a `forced_answer`",
        )


def _get_turn_number(trial: PlanTrial, place: Place) -> int:
    return trial.trees[place[0]].segments[place[1]].turn


def _count_rollouts(trial: PlanTrial) -> int:
    return sum(len(tree.rollouts) for tree in trial.trees)


# Plugins that fail --------------------------------------------------------------------------------


def format_quote(text: str) -> str:
    """Quotes the beginning of untrusted text."""
    return repr(text[:SHOWN]) + ("…" if len(text) > SHOWN else "")


def build_plugin_fault(
    who: str,
    why: str,
    plugin_input: str,
    *,
    path: KeyPath,
    handled: str,
    lenient: bool,
    stand_ins: bool,
) -> Diagnostic:
    """Builds the finding for a plugin that failed on a synthetic rollout.

    Args:
        who: the plugin, in words.
        why: its fault.
        plugin_input: its input, in words.
        path: where the spec names it.
        handled: the `on_error` setting with which a run would continue.
        lenient: `on_error` already lets a run continue.
        stand_ins: the problems are placeholders, so a fault proves nothing.
    """
    ends = f"a run would fail here; `on_error` would let it {handled}"
    on = "a placeholder problem" if stand_ins else "a synthetic response"
    return Diagnostic(
        kind="plugin",
        message=f"{who} failed on {on}: {escape_unprintable(why.splitlines()[0][:LONGEST])}",
        path=path,
        notes=(plugin_input, "a run would continue, as `on_error` is set" if lenient else ends),
        severity="warning" if lenient or stand_ins else "error",
    )
