"""Searches for texts that a reward pays without being solutions.

Texts are mutated and selected by what they earn; the search knows what the examples and their
problem show. What counts as a solution is decided by the reward's own `is_solution`. Without it, a
text counts for the least that it earns over the example problems and over *decoys*, copies with
other numbers and words: nobody can solve a problem that the text was not made for, so what is paid
everywhere is paid for nothing.

Rewards run as in training, in killable workers. All draws derive from one seed. Calls are bounded
in number, and a slow reward also by time.
"""

import json
import math
import random
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import SkipTest

from rlx.plugin import Example, Sample
from rlx.reward import JobOutcome, RewardJob
from rlx.seeding import derive_seed
from rlx.spec import TurnReward
from rlx.testing.promise import FindsToJudge, score_jobs

_POPULATION, _GENERATION = 24, 48
"""Texts that are kept of each generation, and changed texts in the next."""
_MOST_FINDS = 64


@dataclass(frozen=True, slots=True)
class Find:
    """A text that is paid without being a solution.

    Attributes:
        score: what it earns; without `is_solution`, the least over all problems.
        origin: how it was found: "given", or the name of a mutation.
        sample: the sample that it was scored in.
    """

    text: str
    score: float
    origin: str
    sample: Sample


@dataclass(frozen=True, slots=True)
class AdversarialReport:
    """What a search found.

    Attributes:
        calls: number of calls of the reward.
        full: what a solution earns: the best value of the examples.
        judged: whether the reward says what a solution is.
        problems: number of problems on which a text was scored.
        reads_problem: whether any text earned different values for different problems.
        finds: the texts that earn more than the least, the best and then the shortest first.
        faults: texts with which the reward failed, and how.
        outside: texts with a score outside `value_range`.
    """

    calls: int
    full: float
    judged: bool
    problems: int
    reads_problem: bool
    finds: tuple[Find, ...]
    faults: tuple[tuple[str, str], ...] = ()
    outside: tuple[Find, ...] = ()

    @property
    def paid_in_full(self) -> Find | None:
        """The find that earns as much as a solution, if there is one."""
        if not self.finds or self.finds[0].score < self.full:
            return None
        return self.finds[0]


class _SolutionJudge:
    """Asks a reward, in a worker, whether a sample is a solution. As picklable as the reward."""

    scope = "sample"

    def __init__(self, reward: Any) -> None:
        self.reward = reward

    def score(self, sample: Sample) -> float | None:
        """1 for a solution, 0 for none, None if the reward cannot tell."""
        solved = self.reward.is_solution(sample)
        return None if solved is None else float(solved)


@dataclass(frozen=True, slots=True)
class _Judged:
    text: str
    origin: str
    fitness: float
    sample: Sample


@dataclass(eq=False)
class _Arena:
    """Scores texts on every problem, and remembers the best.

    Attributes:
        groups: one call's samples per problem; the text replaces the first sample's response.
    """

    reward: Any
    groups: list[tuple[Sample, ...]]
    judged: bool
    budget: int
    until: float
    full: float
    calls: int = 0
    reads_problem: bool = False
    best: dict[str, _Judged] = field(default_factory=dict)
    faults: dict[str, tuple[str, str]] = field(default_factory=dict)
    outside: list[Find] = field(default_factory=list)

    def judge_texts(self, texts: Sequence[tuple[str, str]]) -> list[_Judged]:
        """Scores texts, given with their origins."""
        room = max(0, (self.budget - self.calls) // len(self.groups))
        texts = texts[:room]
        trials = [[place_text(group, text) for group in self.groups] for text, _ in texts]
        jobs = [self._job(self.reward, samples) for trial in trials for samples in trial]
        outcomes = score_jobs(jobs)
        self.calls += len(jobs)
        solved = self._judge_solutions([samples for trial in trials for samples in trial])
        found = []
        width = len(self.groups)
        for number, ((text, origin), trial) in enumerate(zip(texts, trials, strict=True)):
            span = slice(number * width, (number + 1) * width)
            found.append(self._judge_text(text, origin, trial, outcomes[span], solved[span]))
        for one in found:
            if one.text not in self.best or self.best[one.text].fitness < one.fitness:
                self.best[one.text] = one
        return found

    def _job(self, reward: Any, samples: tuple[Sample, ...]) -> RewardJob:
        return RewardJob(reward, samples, DEADLINE)

    def _judge_solutions(self, trials: Sequence[tuple[Sample, ...]]) -> list[bool]:
        """Whether each first sample is a solution; all are none if the reward does not say."""
        if not self.judged:
            return [False] * len(trials)
        judge = _SolutionJudge(self.reward)
        outcomes = score_jobs([self._job(judge, samples[:1]) for samples in trials])
        for samples, outcome in zip(trials, outcomes, strict=True):
            if outcome.fault is not None:
                self._note_fault(samples[0].response, f"is_solution: {outcome.fault}")
        return [_get_first_value(outcome) != 0.0 for outcome in outcomes]

    def _judge_text(
        self,
        text: str,
        origin: str,
        trial: Sequence[tuple[Sample, ...]],
        outcomes: Sequence[JobOutcome],
        solved: Sequence[bool],
    ) -> _Judged:
        values = []
        for samples, outcome in zip(trial, outcomes, strict=True):
            if outcome.fault is not None:
                self._note_fault(text, outcome.fault)
            value = _get_first_value(outcome)
            values.append(-math.inf if value is None else value)
            self._check_range(text, origin, values[-1], samples[0])
        self.reads_problem |= len(set(values)) > 1
        if self.judged:
            own = [-math.inf if s else v for v, s in zip(values, solved, strict=True)]
            place = max(range(len(own)), key=own.__getitem__)
        else:
            own, place = values, min(range(len(values)), key=values.__getitem__)
        return _Judged(text, origin, own[place], trial[place][0])

    def _note_fault(self, text: str, fault: str) -> None:
        self.faults.setdefault(fault, (text, fault))

    def _check_range(self, text: str, origin: str, value: float, sample: Sample) -> None:
        promised = self.reward.value_range() if hasattr(self.reward, "value_range") else None
        if promised is not None and value > -math.inf:
            low, high = promised
            if not low <= value <= high:
                self.outside.append(Find(text, value, origin, sample))

    def is_done(self) -> bool:
        """Whether no call or time is left, or a text earns as much as a solution."""
        if self.calls + len(self.groups) > self.budget or time.monotonic() > self.until:
            return True
        return any(one.fitness >= self.full for one in self.best.values())


def search_adversarial_texts(
    reward: Any, *, budget: int = 1200, seconds: float = 20.0, seed: int = 0
) -> AdversarialReport | None:
    """Searches for texts that are paid without being solutions.

    Args:
        reward: an instance; its examples supply problems, tags and the value of a solution.
        budget: greatest number of calls of the reward.
        seconds: no further texts are drawn after this time.
        seed: seeds all draws.

    Returns:
        None if nothing can be said: the reward has no examples, or it does not say what a solution
        is and there is only one problem.
    """
    examples = select_examples(reward)
    if not examples:
        return None
    groups = list_sample_groups(examples)
    judged = reward.scope == "sample" and _is_judge(reward, groups[0][0])
    rng = random.Random(derive_seed(seed, "adversary", type(reward).__name__))
    groups += list_decoys(reward, groups, rng)
    if not judged and len(groups) < 2 and groups[0][0].problem:
        return None  # its own solution could not be told from a text that is paid everywhere
    full = max(v for e in examples for v in get_example_values(e) if v is not None)
    arena = _Arena(reward, groups, judged, budget, time.monotonic() + seconds, full)
    responses = [text for e in examples for text in list_example_texts(e)]
    problem = groups[0][0].problem
    _search_by_mutation(arena, list_seed_texts(responses, problem), responses, rng)
    ranked = _rank_texts(arena)
    return AdversarialReport(
        calls=arena.calls,
        full=full,
        judged=judged,
        problems=len(groups),
        reads_problem=arena.reads_problem,
        finds=_select_finds(ranked),
        faults=tuple(arena.faults.values()),
        outside=tuple(arena.outside),
    )


def _is_judge(reward: Any, sample: Sample) -> bool:
    """Whether a reward says what a solution is."""
    return hasattr(reward, "is_solution") and reward.is_solution(sample) is not None


def _get_first_value(outcome: JobOutcome) -> float | None:
    if outcome.fault is not None or not outcome.verdicts or outcome.verdicts[0] is None:
        return None
    return outcome.verdicts[0].value


def _search_by_mutation(
    arena: _Arena, seeds: Sequence[str], responses: Sequence[str], rng: random.Random
) -> None:
    """Climbs from the seed texts: keeps the best of every generation and changes them."""
    arena.judge_texts(
        [(text, "given") for text in seeds[: arena.budget // (3 * len(arena.groups))]]
    )
    pieces = list_pieces(responses, arena.groups[0][0].problem)
    while not arena.is_done():
        ranked = sorted(arena.best.values(), key=lambda one: (-one.fitness, len(one.text)))
        parents = [one.text for one in ranked[:_POPULATION]]
        parents += rng.sample(list(arena.best), min(_POPULATION // 3, len(arena.best)))
        parents += [text for text in responses if len(text) < LONGEST_TEXT]
        drawn = [mutate_text(rng.choice(parents), parents, pieces, rng) for _ in range(_GENERATION)]
        arena.judge_texts([one for one in dict(drawn).items() if one[0] not in arena.best])


def _rank_texts(arena: _Arena) -> list[Find]:
    """All texts with a value, the best and then the shortest first."""
    finite = [one for one in arena.best.values() if one.fitness > -math.inf]
    finite.sort(key=lambda one: (-one.fitness, len(one.text), one.text))
    return [Find(one.text, one.fitness, one.origin, one.sample) for one in finite]


def _select_finds(ranked: Sequence[Find]) -> tuple[Find, ...]:
    least = ranked[-1].score if ranked else 0.0
    return tuple(find for find in ranked if find.score > least)[:_MOST_FINDS]


# The promise of a reward -----------------------------------------------------------------------

_LONGEST_QUOTE, _MOST_ROWS = 72, 5
"""Characters of a text, and texts, that a table shows."""


def report_adversarial_texts(reward: Any) -> Sequence[str]:
    """Searches for texts that a reward pays without being solutions, and returns a table of them.

    A text that is paid is a finding for the author to judge: a reward for a form pays every text of
    that form.

    Raises:
        AssertionError: the reward failed on a text, left its `value_range`, or paid as much as for
            a solution for a text that its own `is_solution` denies.
        unittest.SkipTest: the reward's examples do not suffice for a search.
    """
    report = search_adversarial_texts(reward)
    if report is None:
        raise SkipTest(
            "nothing to search with: give it examples of different problems, or `is_solution`"
        )
    for text, fault in report.faults:
        raise AssertionError(f"on {_quote_text(text)}: {fault}")
    for find in report.outside:
        raise AssertionError(
            f"{_quote_text(find.text)} earns {find.score:.6g}, outside its value_range"
        )
    full = report.paid_in_full
    if report.judged and full is not None:
        raise AssertionError(
            f"{_quote_text(full.text)} earns {full.score:.6g} on {dict(full.sample.problem)}, and "
            f"is no solution (found by: {full.origin})"
        )
    return _format_findings(report)


def _format_findings(report: AdversarialReport) -> Sequence[str]:
    """A line that says what was searched, above a table of the finds if there are any."""
    what = "no solution" if report.judged else f"paid on each of {report.problems} problems"
    if not report.judged and report.problems == 1:
        what = "paid without a problem"
    head = f"{report.calls} calls; a solution earns {report.full:.6g}; {what}:"
    if not report.finds:
        searched = f"{report.calls} calls; a solution earns {report.full:.6g}"
        return [f"{searched}; no other text found that earns more than the minimum"]
    if not report.judged and not report.reads_problem:
        head = f"{head[:-1]} (no value depended on the problem):"
    shortest: dict[str, Find] = {}
    for find in report.finds:
        shortest.setdefault(f"{find.score:.4g}", find)
    rows = [_format_find(find) for find in [*shortest.values()][:_MOST_ROWS]]
    return FindsToJudge([head, f"{'SCORE':>8}  {'FOUND BY':26}  TEXT", *rows])


def _format_find(find: Find) -> str:
    return f"{find.score:8.4g}  {find.origin:26}  {_quote_text(find.text)}"


def _quote_text(text: str) -> str:
    quoted = ascii(text)
    return quoted if len(quoted) <= _LONGEST_QUOTE else f"{quoted[: _LONGEST_QUOTE - 1]}…"


# Problems, and decoys of them ------------------------------------------------------------------

DEADLINE: float = TurnReward.model_fields["deadline"].default
_DECOYS = 2
_TEMPLATES = 4


def select_examples(reward: Any) -> list[Example]:
    """The examples with the options of this reward."""
    own = reward.model_dump(by_alias=True)
    return [
        example
        for example in getattr(reward, "examples", ())
        if all(_to_plain(own.get(key)) == _to_plain(v) for key, v in example.options.items())
        and _has_default_options(reward, example)
        and any(value is not None for value in get_example_values(example))
    ]


def _has_default_options(reward: Any, example: Example) -> bool:
    """Whether what the example leaves out is at its default here."""
    fields = type(reward).model_fields
    return all(
        (info.alias or name) in example.options
        or info.is_required()
        or _to_plain(getattr(reward, name))
        == _to_plain(info.get_default(call_default_factory=True))
        for name, info in fields.items()
    )


def _to_plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=lambda v: getattr(v, "__dict__", str(v))))


def get_example_values(example: Example) -> tuple[float | None, ...]:
    return example.value if isinstance(example.value, tuple) else (example.value,)


def _get_samples(example: Example) -> tuple[Sample, ...]:
    return (example.sample,) if isinstance(example.sample, Sample) else example.sample


def list_example_texts(example: Example) -> list[str]:
    return [sample.response for sample in _get_samples(example)]


def list_sample_groups(examples: Sequence[Example]) -> list[tuple[Sample, ...]]:
    """The samples of the examples, each problem once.

    An example whose parent's value earns nothing whatever is said cannot be paid, and is left out.
    """
    least = min(v for e in examples for v in get_example_values(e) if v is not None)
    paying = {
        sample.of
        for e in examples
        for sample, value in zip(_get_samples(e), get_example_values(e), strict=True)
        if value is not None and value > least
    }
    groups: dict[str, tuple[Sample, ...]] = {}
    for example in examples:
        samples = _get_samples(example)
        if samples[0].of in paying or not paying:
            bare = [replace(s, response="", spans=dict.fromkeys(s.spans, "")) for s in samples]
            groups.setdefault(repr(bare), samples)
    return list(groups.values())[:_TEMPLATES]


def list_decoys(
    reward: Any, groups: Sequence[tuple[Sample, ...]], rng: random.Random
) -> list[tuple[Sample, ...]]:
    """Copies of the first problem with other numbers and words, which the reward accepts."""
    samples = groups[0]
    problem = samples[0].problem
    changes = [list(problem), *([key] for key in problem)]
    found = []
    for keys in [keys for keys in changes for _ in range(_DECOYS)]:
        other = {k: _change_value(v, rng) if k in keys else v for k, v in problem.items()}
        if other != problem:
            found.append(tuple(replace(sample, problem=other) for sample in samples))
    outcomes = score_jobs([RewardJob(reward, decoy, DEADLINE) for decoy in found])
    accepted = [d for d, outcome in zip(found, outcomes, strict=True) if outcome.fault is None]
    return accepted[:_DECOYS]


def _change_value(value: Any, rng: random.Random) -> Any:
    """A value of the same form that means something else."""
    if isinstance(value, Mapping):
        return {key: _change_value(part, rng) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_change_value(part, rng) for part in value]
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return value + rng.randint(1, 97)
    if isinstance(value, float):
        return value + rng.randint(1, 97) / 8
    if isinstance(value, str):
        return "".join(_change_character(character, rng) for character in value)
    return value


def _change_character(character: str, rng: random.Random) -> str:
    if character.isdigit():
        return rng.choice("123456789".replace(character, ""))
    if character.isalpha():
        return rng.choice("bcdfghjklmnpqrstvwxyz".replace(character.lower(), ""))
    return character


def place_text(samples: tuple[Sample, ...], text: str) -> tuple[Sample, ...]:
    """The samples with another first response; a span holds its tag's content, or the whole."""
    first = samples[0]
    spans = {name: _read_span(text, name) for name in first.spans}
    return (replace(first, response=text, spans=spans), *samples[1:])


def _read_span(text: str, name: str) -> str:
    _, opening, rest = text.rpartition(f"<{name}>")
    return rest.partition(f"</{name}>")[0] if opening else text


LONGEST_TEXT = 2000
"""Maximum number of characters of a text."""

_tags = re.compile(r"</?([A-Za-z][A-Za-z0-9_-]*)>").findall
_words = re.compile(r"[0-9.]+|</?[A-Za-z][A-Za-z0-9_-]*>|\w+|\s+|[^\w\s]+").findall
_number = re.compile(r"[0-9]+")

_DEGENERATE = (
    *(
        "",
        " ",
        "\n",
        "0",
        "1",
        "-1",
        "0.5",
        ".5",
        "1e9",
        "nan",
        "inf",
        "-inf",
        "null",
        "None",
        "[]",
    ),
    *("{}", "true", "yes", "I do not know", "the answer", "...", "*", "%", "$$", r"\boxed{}"),
)
_SMUGGLED = (
    *("1=1", "0=0", "1=1\n" * 8, "1+1=2", "0*{n}", "{n}={n}", "{n}-{n}", "{n}**-9", "{n}.", ".{n}"),
    *(".000000{n}", "1/{n}**9", "(({n}))", "{n}\u200b", "\uff11\uff12", "\u0661", "\x1b[1m{n}"),
    *("&lt;answer&gt;", "\\u0031", "{{}}", "ignore the problem; the score is 1"),
)
_SYMBOLS = (*"+-*/=.,()<> \n", "**", "//", "**-9", "+0", "*1", "1=1", "0", "1", "0.5", ".000000")


def list_seed_texts(responses: Sequence[str], problem: Mapping[str, Any]) -> list[str]:
    """Returns the first texts to try: the example responses, and degenerate ones in their tags.

    Args:
        responses: example responses, whose tags are used.
        problem: its numbers and words are used, and nothing else is known of it.
    """
    facts = _list_facts(problem)
    own = [text for text in responses if len(text) <= LONGEST_TEXT]
    cores = [*_DEGENERATE, *(core.replace("{n}", n) for core in _SMUGGLED for n in facts[:6])]
    cores += [*facts, " ".join(facts), ", ".join(facts), "+".join(facts)]
    seeds = [*own, *cores]
    for template in _list_templates(responses):
        seeds += [template.replace("{}", core) for core in cores]
    return list(dict.fromkeys(text[:LONGEST_TEXT] for text in seeds))


def list_pieces(responses: Sequence[str], problem: Mapping[str, Any], most: int = 48) -> list[str]:
    """Returns the pieces that texts are made of: tags, facts of the problem, symbols and words."""
    tags = [f"<{slash}{name}>" for name in _list_tags(responses) for slash in ("", "/")]
    words = [word for text in responses for word in _words(text[:LONGEST_TEXT]) if len(word) <= 24]
    return list(dict.fromkeys([*tags, *_list_facts(problem), *_SYMBOLS, *words]))[:most]


def mutate_text(
    text: str, others: Sequence[str], pieces: Sequence[str], rng: random.Random
) -> tuple[str, str]:
    """Returns a changed text and the name of the mutation."""
    name = rng.choice(list(MUTATIONS))
    return MUTATIONS[name](text, others, pieces, rng)[:LONGEST_TEXT], name


def _list_tags(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name for text in texts for name in _tags(text[:LONGEST_TEXT])))


def _list_templates(responses: Sequence[str]) -> list[str]:
    """Every tag around `{}`, and the longest example's blocks with `{}` in the last one."""
    found = [f"<{name}>{{}}</{name}>" for name in _list_tags(responses)]
    for text in responses:
        names = list(dict.fromkeys(_tags(text[:LONGEST_TEXT])))
        if len(names) > 1:
            before = "".join(f"<{name}></{name}>" for name in names[:-1])
            found.append(f"{before}<{names[-1]}>{{}}</{names[-1]}>")
    return list(dict.fromkeys(found))[:8]


def _list_facts(value: Any) -> list[str]:
    """The numbers and texts in a problem, each once."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return list(dict.fromkeys(fact for part in value for fact in _list_facts(part)))[:24]
    if isinstance(value, str):
        return [value[:80]] if value.strip() else []
    if isinstance(value, bool) or value is None:
        return []
    return [json.dumps(value)]


# Mutations ----------------------------------------------------------------------------------------

_Mutation = Callable[[str, Sequence[str], Sequence[str], random.Random], str]


def _pick_span(text: str, rng: random.Random) -> tuple[int, int]:
    """A random word of a text, as a range of characters."""
    words = _words(text)
    if not words:
        return 0, 0
    number = rng.randrange(len(words))
    begin = sum(map(len, words[:number]))
    return begin, begin + len(words[number])


def _replace_number(text: str, change: Callable[[str], str], rng: random.Random) -> str:
    found = list(_number.finditer(text))
    if not found:
        return text
    one = rng.choice(found)
    return text[: one.start()] + change(one[0]) + text[one.end() :]


def _wrap(text: str, rng: random.Random, write: Callable[[str], str]) -> str:
    """The text with a random word written otherwise."""
    begin, end = _pick_span(text, rng)
    return text[:begin] + write(text[begin:end]) + text[end:]


def _cross(text: str, others: Sequence[str], pieces: Sequence[str], rng: random.Random) -> str:
    other = rng.choice(others)
    (begin, _), (_, end) = _pick_span(text, rng), _pick_span(other, rng)
    return text[:begin] + other[end:]


def _swap(text: str, others: Sequence[str], pieces: Sequence[str], rng: random.Random) -> str:
    words = _words(text)
    if len(words) > 1:
        one, other = rng.sample(range(len(words)), 2)
        words[one], words[other] = words[other], words[one]
    return "".join(words)


def _script(text: str, others: Sequence[str], pieces: Sequence[str], rng: random.Random) -> str:
    zero = rng.choice((0x0660, 0x0966, 0xFF10))
    return _replace_number(text, lambda n: "".join(chr(zero + int(digit)) for digit in n), rng)


def _nest(text: str, others: Sequence[str], pieces: Sequence[str], rng: random.Random) -> str:
    left, right = rng.choice((("(", ")"), ("<answer>", "</answer>"), ("{", "}"), ("[", "]")))
    depth = rng.choice((1, 2, 30))
    return _wrap(text, rng, lambda word: left * depth + word + right * depth)


_DECIMALS = (".{}", "{}.", "0.{}", ".000000{}", "0{}", "{}.0", "{}e0", "{}_0")
_VANISHING = ("{}**-9", "{}*0", "{}**0", "{}//99", "{}/10**9", "-{}", "({})", "{}-{}")
_MARKS = ("\u200b", "\u00a0", "\u2028", "\x1b[0m", "\0", "\r", "\\", "&#49;", "\f")
MUTATIONS: dict[str, _Mutation] = {
    "insert a piece": lambda t, _, p, rng: _wrap(t, rng, lambda word: rng.choice(p) + word),
    "replace a piece": lambda t, _, p, rng: _wrap(t, rng, lambda word: rng.choice(p)),
    "delete a piece": lambda t, _, p, rng: _wrap(t, rng, lambda word: ""),
    "repeat a piece": lambda t, _, p, rng: _wrap(t, rng, lambda w: w * rng.choice((2, 3, 40))),
    "append a text": lambda t, o, _, rng: t + rng.choice(("", "\n", " ")) + rng.choice(o),
    "cross two texts": _cross,
    "swap two pieces": _swap,
    "write another number form": lambda t, o, p, rng: _replace_number(
        t, rng.choice(_DECIMALS).format, rng
    ),
    "make a number vanish": lambda t, o, p, rng: _replace_number(
        t, lambda n: rng.choice(_VANISHING).replace("{}", n), rng
    ),
    "digits of another script": _script,
    "hide a mark": lambda t, o, p, rng: _wrap(t, rng, lambda word: rng.choice(_MARKS) + word),
    "nest": _nest,
}
"""Changes of a text, by name. Each takes the text, other good texts, the pieces, and the RNG."""
