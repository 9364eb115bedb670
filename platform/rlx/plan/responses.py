"""Made-up responses, and a sampling session that answers with them.

In a group that is large enough there is a good and a poor response, one without tags, one that ran
out of tokens, and two that are alike: what training meets, whatever the model.
"""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlx.plan.stand_ins import EncodingDialogue, fit_to_vocabulary
from rlx.plugin import Problem, Task
from rlx.rollout import Completion, CompletionRequest, RolloutPlan
from rlx.seeding import derive_seed
from rlx.spec import TurnSpec

__all__ = ["ROLES", "FakeSession", "ResponseAuthor", "Role", "find_right_answers"]

Role = Literal["good", "poor", "untagged", "cut", "twin", "any"]

ROLES: tuple[Role, ...] = ("good", "poor", "untagged", "cut", "twin")
"""Of the first responses of a group; the others may be good or poor."""

DRAWS = 24
"""Demonstrations that are looked at for a good or a poor one."""

TRUTHS = re.compile(r"answer|truth|solution|label|target|gold", re.IGNORECASE)
TAG = re.compile(r"\s*(?:</?[A-Za-z_][\w-]*>\s*)+")
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
CONFIDENCE = re.compile(r"<confidence>.*?</confidence>", re.DOTALL)


def find_right_answers(fields: Mapping[str, Any]) -> list[str]:
    """What in a problem's record looks like a right answer, the likeliest first.

    `solution` before `answer`, since a record that has both shows how and how much; of a worked
    answer in the manner of GSM8K, what stands behind `####`.
    """
    found: list[tuple[bool, str]] = []
    for name, value in fields.items():
        if isinstance(value, Mapping):
            found += [(False, text) for text in find_right_answers(value)]
        elif TRUTHS.search(name):
            values = value if isinstance(value, list | tuple) else [value]
            said = [str(v) for v in values if isinstance(v, str | int | float)]
            found += [("solution" in name.lower(), s.rpartition("####")[2].strip()) for s in said]
    return [text for _, text in sorted(found, key=lambda pair: not pair[0]) if text]


@dataclass(frozen=True, slots=True)
class ResponseAuthor:
    """Writes the made-up responses of an experiment.

    Attributes:
        plan: whose turns are written.
        task: asked for demonstrations.
        speech: how texts become tokens.
    """

    plan: RolloutPlan
    task: Task
    speech: EncodingDialogue

    def write_response_group(
        self, problem: Problem, level: int, seeds: Sequence[int], *, number: int = 0
    ) -> tuple[Completion, ...]:
        """The responses below one context, one per seed.

        Args:
            problem: what is asked.
            level: of the turn, from 0.
            seeds: one per response.
            number: of the context; where each has one response, every other one is poor.
        """
        turn = self.plan.levels[level].turn
        tenths = random.Random(seeds[0]).sample(range(1, 10), 9)
        written: list[Completion] = []
        for place, seed in enumerate(seeds):
            at = place if len(seeds) > 1 else number % 2
            role: Role = ROLES[at] if at < len(ROLES) else "any"
            if role == "twin":
                written.append(written[0])
                continue
            confidence = f"0.{tenths[place % len(tenths)]}"
            text = self.write_response_text(problem, level, seed, role, confidence)
            if role == "untagged":
                text = TAG.sub("\n", text).strip() or text
            written.append(self.completion(text, turn, cut=role == "cut", seed=seed))
        return tuple(written)

    def write_response_text(
        self, problem: Problem, number: int, seed: int, role: Role, confidence: str
    ) -> str:
        """A demonstration of the task where one fits, else the turn's spans filled in.

        Args:
            problem: what is asked.
            number: of the turn, from 0.
            seed: decides the demonstration.
            role: what is wanted; whoever calls takes tags away, or cuts.
            confidence: what the turn states, where it states one.
        """
        talk = self.plan.talk
        turn = self.plan.levels[number].turn if talk is None else talk.sampling(number + 1)
        answers = number == 0 or talk is not None
        known = find_right_answers(problem.fields) if answers else []
        poor = role == "poor"
        spans = _fill_declared_spans(turn, known, poor, confidence)
        shown = self._demonstrations(problem, number, seed)
        loose = role == "any" or not known
        text = next((t for t in shown if loose or _is_right(t, known) != poor), None)
        if text is None:
            said = _alter_answer(known[0]) if known and poor else (known or ["42"])[0]
            bare = said if answers else confidence
            return fit_to_vocabulary(
                self.speech, "\n".join(_format_tagged_span(*pair) for pair in spans) or bare
            )
        text = CONFIDENCE.sub(f"<confidence>{confidence}</confidence>", text)
        whole = fit_to_vocabulary(self.speech, _add_missing_spans(text, spans))
        return whole if len(self.speech.encode(whole)) < turn.max_new_tokens else text

    def _demonstrations(self, problem: Problem, number: int, seed: int) -> Iterator[str]:
        """What the task shows of this turn, good and poor, none twice."""
        if not getattr(self.task, "demonstrates", True):
            return
        seen = set()
        for draw in range(DRAWS):
            try:
                turns = self.task.demonstration(problem, derive_seed(seed, draw)).turns
            except Exception:  # noqa: BLE001  (a problem that stands in may be none of the task's)
                return
            if number < len(turns) and turns[number] not in seen:
                seen.add(turns[number])
                yield turns[number]

    def completion(self, text: str, turn: TurnSpec, *, cut: bool, seed: int) -> Completion:
        """The tokens of a text, ended as the turn's settings would end it, or cut in the middle."""
        stops = [at + len(stop) for stop in turn.stop if (at := text.find(stop)) >= 0]
        ids = self.speech.encode(text[: min(stops)] if stops else text)
        if not stops:
            ids = (*ids, self.speech.end_ids[0])
        budget = min(turn.max_new_tokens, max(1, len(ids) // 2)) if cut else turn.max_new_tokens
        is_whole = len(ids) <= budget
        rng = random.Random(seed)
        kept = ids[:budget]
        logprobs = tuple(-rng.expovariate(3.0) for _ in kept)
        return Completion(kept, logprobs, "stop" if is_whole else "length")


def _fill_declared_spans(
    turn: TurnSpec, known: Sequence[str], poor: bool, confidence: str
) -> list[tuple[str, str]]:
    """Every span that a turn declares, with something to stand in it."""
    right = known[0] if known else "42"
    said = _alter_answer(right) if poor else right
    contents = dict.fromkeys(turn.spans, f"Let me see: {said}")
    stated = [name for name in turn.spans if name not in ("think", "analysis", "confidence")]
    contents |= dict.fromkeys(stated[-1:], said)
    contents |= {name: confidence for name in turn.spans if name == "confidence"}
    return list(contents.items())


def _format_tagged_span(name: str, text: str) -> str:
    return f"<{name}>{text}</{name}>"


def _add_missing_spans(text: str, spans: Sequence[tuple[str, str]]) -> str:
    """`text` with those spans that it lacks: before it until the first that it has, else behind."""
    has = [f"</{name}>" in text for name, _ in spans]
    first = has.index(True) if True in has else 0
    before = [_format_tagged_span(*span) for span in spans[:first]]
    behind = [
        _format_tagged_span(*s)
        for s, there in zip(spans[first:], has[first:], strict=True)
        if not there
    ]
    return "\n".join([*before, text, *behind])


def _is_right(text: str, known: Sequence[str]) -> bool:
    """Whether a response gives a right answer, in its last answer block where it has one."""
    blocks = ANSWER.findall(text)
    return blocks[-1].strip() in known if blocks else any(answer in text for answer in known)


def _alter_answer(answer: str) -> str:
    """Another answer than this one."""
    try:
        return str(int(answer) + 1)
    except ValueError:
        return f"{answer}+1" if any(map(str.isdigit, answer)) else f"not {answer}"


class FakeSession:
    """A sampling session without a model; see `rlx.rollout.Session`.

    Args:
        author: what answers.
        problems: of the trees being grown, in order.
        room: tokens of a dialogue that the model can hold.
    """

    def __init__(self, author: ResponseAuthor, problems: Sequence[Problem], room: int) -> None:
        self._author, self._problems = author, problems
        self.context_length = room
        self._level = 0
        self._tree_of: list[int] = []

    def generate(
        self, requests: Sequence[CompletionRequest], sampling: TurnSpec
    ) -> list[tuple[Completion, ...]]:
        """One made-up completion per seed; the n-th call is the n-th level."""
        trees = [
            order if request.extends is None else self._tree_of[request.extends]
            for order, request in enumerate(requests)
        ]
        groups = [
            self._author.write_response_group(
                self._problems[tree], self._level, request.seeds, number=number
            )
            for number, (tree, request) in enumerate(zip(trees, requests, strict=True))
        ]
        self._level += 1
        self._tree_of = [t for t, g in zip(trees, groups, strict=True) for _ in g]
        return groups
