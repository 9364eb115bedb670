"""Synthetic responses, and sampling sessions that return them: with and without an environment.

A group that is large enough contains a good response, a poor one, one without tags, one that ran
out of tokens, and two identical ones: the cases that training meets with any model. If a task has a
script for its warm start, the turns of an environment come from it, so that the environment
receives the kind of turns that it will receive from the model.
"""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from tokenizers import AddedToken

from rlx.discovery import ExperimentPlugins
from rlx.errors import SpecError, summarize_error
from rlx.model import (
    ModelDialogue,
    PlainDialogue,
    Vocabulary,
    build_vocabulary_dialogue,
    choose_vocabulary,
    find_gguf_file,
    load_local_dialogue,
    load_vocabulary,
)
from rlx.plugin import Action, Problem, Rehearsed, StandsIn, Step, Task
from rlx.plugin_calls import blame_plugin, show_plugin_output
from rlx.rollout import (
    Completion,
    CompletionRequest,
    EnvironmentHost,
    EnvironmentPlan,
    HostFault,
    RolloutPlan,
    ToolDialogue,
    derive_turn_seed,
    join_results,
    make_up_call,
)
from rlx.seeding import derive_seed
from rlx.spec import ExperimentSpec, TinyModelSpec, TurnSpec

TAGS = re.compile(r"(</?[A-Za-z_][\w-]*>)")


class EncodingDialogue(ToolDialogue, Protocol):
    """A dialogue that can also encode arbitrary text and decode single tokens."""

    end_ids: tuple[int, ...]

    def encode(self, text: str) -> tuple[int, ...]:
        """Encodes a text without special tokens.

        Raises:
            SpecError: the vocabulary lacks some of it.
        """
        ...

    def piece(self, token: int) -> str:
        """Decodes a single token."""
        ...


# Tokenizers --------------------------------------------------------------------------------------
_PIECE = re.compile(r" ?[^\W\d_]{1,8}|\d| ?[^\w\s]|\s|_")
"""Short words with the space before them, single digits, single signs: roughly how large byte-level
vocabularies split a text."""


class WordVocabulary(Vocabulary):
    """A vocabulary of the words, digits and signs of the texts that it has encoded: it writes any
    text."""

    END = "<|endoftext|>"

    def __init__(self) -> None:
        self._ids = {self.END: 0}
        self._pieces = [self.END]

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """The tokens of a text; new pieces become part of the vocabulary."""
        ids = [self._ids.setdefault(one, len(self._ids)) for one in _PIECE.findall(text)]
        self._pieces = list(self._ids)
        return ids

    def decode(self, ids: Sequence[int], **_: bool) -> str:
        """The text of tokens."""
        return "".join(self._pieces[token] for token in ids)

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        """The token that ends a turn."""
        return {0: AddedToken(self.END, special=True)}

    @property
    def unk_token_id(self) -> None:
        """It has no token for what cannot be written."""


@dataclass(frozen=True, slots=True)
class PlanSpeech:
    """The dialogue of the experiment's model.

    Attributes:
        dialogue: converts text to tokens and back.
        vocabulary: number of tokens of a tiny model; None for a pretrained one.
        note: what stands in for the tokenizer; "" if it is the model's own.
    """

    dialogue: ModelDialogue
    vocabulary: int | None
    note: str


def load_speech(spec: ExperimentSpec, plugins: ExperimentPlugins) -> PlanSpeech:
    """Loads the dialogue of the experiment's model, or a stand-in for it.

    Raises:
        SpecError, EnvironmentFault: the tokenizer is here but cannot be used.
    """
    model, note = spec.model, ""
    if not isinstance(model, TinyModelSpec):
        if (dialogue := load_local_dialogue(model)) is not None:
            return PlanSpeech(dialogue, None, "")
        here = "not on this machine"
        if find_gguf_file(model) is not None:
            here = "read when a run, or `rlx plan --try`, converts that file"
        note = (
            f"model.path: the tokenizer of {model.path!r} is {here}; words, digits "
            "and signs stand in for its tokens, so token counts are estimates"
        )
        return PlanSpeech(PlainDialogue(WordVocabulary(), (0,)), None, note)
    try:
        vocabulary = choose_vocabulary(spec, plugins)
    except (OSError, ImportError, ValueError) as error:  # the plan of the problems reports it
        if model.tokenizer is None:
            vocabulary = load_vocabulary(model)
        else:
            vocabulary = Vocabulary.build_bytes()
            note = (
                "model.tokenizer: it is trained on texts that are missing "
                f"({summarize_error(error)}); bytes stand in, so token counts are estimates"
            )
    return PlanSpeech(build_vocabulary_dialogue(vocabulary), len(vocabulary), note)


def fit_to_vocabulary(speech: EncodingDialogue, text: str) -> str:
    """Reduces `text` to what the vocabulary can encode: no unknown signs, digits one by one."""

    def is_known(part: str) -> bool:
        try:
            speech.encode(part)
        except SpecError:
            return False
        return True

    if is_known(text):
        return text
    known = "".join(
        part if is_known(part) else "".join(filter(is_known, part)).strip(" ")
        for part in TAGS.split(text)
    )
    for between in (r"(?<=\d)(?=\d)", r"(?<=[0-9])(?=\.)|(?<=\.)(?=[0-9])"):
        if not is_known(known):
            known = re.sub(between, " ", known)
    return known


# Problems ----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class PlanProblems:
    """The task's problems, or placeholders; `note` is what replaces them and why, or ""."""

    problems: tuple[Problem, ...]
    note: str = ""


def load_plan_problems(spec: ExperimentSpec, task: Task, count: int) -> PlanProblems:
    """The first training problems of an experiment, or placeholders if its data are missing.

    Raises:
        SpecError: the data are here but do not match the options.
        PluginError: the task fails.
    """
    seed = derive_seed(spec.seed, "train")  # as in a training run
    try:
        with blame_plugin(
            "task", spec.task.plugin, "problem 0", (OSError, ImportError, ValueError)
        ):
            return PlanProblems(tuple(task.problem("train", i, seed) for i in range(count)))
    except (OSError, ImportError) as error:
        note = f"task: its data are not on this machine ({summarize_error(error)})"
        if isinstance(task, StandsIn) and task.stand_ins:
            problems = tuple(task.stand_in(i, seed) for i in range(count))
            return PlanProblems(problems, f"{note}; {task.stand_ins} stand in")
        problems = tuple(_make_up_problem(task, number) for number in range(count))
        return PlanProblems(problems, f"{note}; problems that rlx made up stand in")
    except ValueError as error:
        raise SpecError(f"task: {summarize_error(error)}") from error


def _make_up_problem(task: Task, number: int) -> Problem:
    """A product, with the field names that the task's options set."""
    question, answer = f"{number + 6} * 7 = ?", str((number + 6) * 7)
    named = getattr(task, "fields", None)
    truths = re.compile("answer|truth|solution|target|label", re.IGNORECASE)
    names = named if isinstance(named, Mapping) else ("question", "answer")
    fields = {name: answer if truths.search(name) else question for name in names}
    try:
        prompt = str(getattr(task, "prompt", "{question}")).format(**fields)
    except (LookupError, ValueError):
        prompt = question
    return Problem(id=f"stand-in/{number}", prompt=prompt, fields=fields)


Role = Literal["good", "poor", "untagged", "cut", "twin", "any"]


ROLES: tuple[Role, ...] = ("good", "poor", "untagged", "cut", "twin")
"""Roles of a group's first responses; the remaining ones are good or poor."""


_DRAWS = 24
"""Demonstrations to try when looking for a good or a poor one."""


_TRUTHS = re.compile(r"answer|truth|solution|label|target|gold", re.IGNORECASE)


_TAG_LINES = re.compile(r"\s*(?:</?[A-Za-z_][\w-]*>\s*)+")


_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


_CONFIDENCE = re.compile(r"<confidence>.*?</confidence>", re.DOTALL)


def find_right_answers(fields: Mapping[str, Any]) -> list[str]:
    """Lists the values in a problem's record that look like a right answer, likeliest first.

    `solution` comes before `answer`, because a record with both holds the working in one and the
    result in the other. From a GSM8K-style worked answer only the text after `####` is taken.
    """
    found: list[tuple[bool, str]] = []
    for name, value in fields.items():
        if isinstance(value, Mapping):
            found += [(False, text) for text in find_right_answers(value)]
        elif _TRUTHS.search(name):
            values = value if isinstance(value, list | tuple) else [value]
            texts = [str(v) for v in values if isinstance(v, str | int | float)]
            found += [("solution" in name.lower(), s.rpartition("####")[2].strip()) for s in texts]
    return [text for _, text in sorted(found, key=lambda pair: not pair[0]) if text]


# Texts -------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class ResponseAuthor:
    """Writes the synthetic responses of an experiment.

    Attributes:
        plan: the schedule whose turns are written.
        spec: the experiment, whose schedule arranges demonstrations.
        task: source of demonstrations.
        speech: converts texts to tokens.
    """

    plan: RolloutPlan
    spec: ExperimentSpec
    task: Task
    speech: EncodingDialogue

    def write_response_group(
        self, problem: Problem, level: int, seeds: Sequence[int], *, number: int = 0
    ) -> tuple[Completion, ...]:
        """Returns the responses below one context, one per seed.

        Args:
            level: level of the turn, from 0.
            number: number of the context; with one response per context, every other one is poor.
        """
        turn = self.plan.levels[level].turn
        tenths = random.Random(seeds[0]).sample(range(1, 10), 9)
        written: list[Completion] = []
        for place, seed in enumerate(seeds):
            role = _get_role(place if len(seeds) > 1 else number % 2)
            if role == "twin":
                written.append(written[0])
                continue
            confidence = f"0.{tenths[place % len(tenths)]}"
            text = self.write_response_text(problem, level, seed, role, confidence)
            if role == "untagged":
                text = _TAG_LINES.sub("\n", text).strip() or text
            written.append(self.end_response(text, turn, cut=role == "cut", seed=seed))
        return tuple(written)

    def write_response_text(
        self, problem: Problem, number: int, seed: int, role: Role, confidence: str
    ) -> str:
        """Returns a matching demonstration of the task, otherwise the turn's spans filled in.

        Args:
            number: number of the turn, from 0.
            seed: selects the demonstration.
            role: the wanted kind of response; the caller removes tags or truncates.
            confidence: the confidence that the turn states, if it states one.
        """
        talk = self.plan.talk
        turn = self.plan.levels[number].turn if talk is None else talk.sampling(number + 1)
        answers = number == self.plan.answer_level or talk is not None
        known = find_right_answers(problem.fields) if answers else []
        poor = role == "poor"
        right = known[0] if known else "42"
        answer = _alter_answer(right) if poor else right
        spans = _fill_spans(turn, answer, confidence)
        demonstrations = self._list_demonstrations(problem, number, seed)
        loose = role == "any" or not known
        text = next((t for t in demonstrations if loose or _is_right(t, known) != poor), None)
        if text is None:
            bare = answer if answers else confidence
            return fit_to_vocabulary(self.speech, "\n".join(spans.values()) or bare)
        text = _CONFIDENCE.sub(f"<confidence>{confidence}</confidence>", text)
        whole = fit_to_vocabulary(self.speech, _add_missing_spans(text, spans))
        return whole if len(self.speech.encode(whole)) < turn.max_new_tokens else text

    def _list_demonstrations(self, problem: Problem, number: int, seed: int) -> Iterator[str]:
        """Yields the task's demonstrations of this turn, good and poor, without duplicates."""
        if not getattr(self.task, "demonstrates", True):
            return
        seen = set()
        for draw in range(_DRAWS):
            try:
                with show_plugin_output(self.spec.task.plugin):
                    worked = self.task.demonstration(problem, derive_seed(seed, draw))
                turns = self.spec.rollout.arrange_demonstration(worked.turns)
            except Exception:  # noqa: BLE001  (a placeholder may not be a problem of this task)
                return
            if number < len(turns) and turns[number] and turns[number] not in seen:
                seen.add(turns[number])
                yield turns[number]

    def end_response(self, text: str, turn: TurnSpec, *, cut: bool, seed: int) -> Completion:
        """Encodes a text, ended as the turn's settings would end it, or cut in the middle."""
        stops = [at + len(stop) for stop in turn.stop if (at := text.find(stop)) >= 0]
        ids = self.speech.encode((text[: min(stops)] if stops else text).removeprefix(turn.prefix))
        if not stops:
            ids = (*ids, self.speech.end_ids[0])
        budget = min(turn.max_new_tokens, max(1, len(ids) // 2)) if cut else turn.max_new_tokens
        rng, kept = random.Random(seed), ids[:budget]
        logprobs = tuple(-rng.expovariate(3.0) for _ in kept)
        return Completion(kept, logprobs, "stop" if len(ids) <= budget else "length")


def _get_role(place: int) -> Role:
    return ROLES[place] if place < len(ROLES) else "any"


def _fill_spans(turn: TurnSpec, answer: str, confidence: str) -> dict[str, str]:
    """Fills every span that a turn declares: its text with tags, by its name."""
    contents = dict.fromkeys(turn.spans, f"Let me see: {answer}")
    stated = [name for name in turn.spans if name not in ("think", "analysis", "confidence")]
    contents |= dict.fromkeys(stated[-1:], answer)
    contents |= {name: confidence for name in turn.spans if name == "confidence"}
    return {name: f"<{name}>{text}</{name}>" for name, text in contents.items()}


def _add_missing_spans(text: str, spans: Mapping[str, str]) -> str:
    """Adds the missing spans to `text`: before the first span that it has, otherwise at the end."""
    has = [f"</{name}>" in text for name in spans]
    first, filled = has.index(True) if True in has else 0, list(spans.values())
    behind = [s for s, there in zip(filled[first:], has[first:], strict=True) if not there]
    return "\n".join([*filled[:first], text, *behind])


def _is_right(text: str, known: Sequence[str]) -> bool:
    """Whether a response gives a right answer, looking at its last answer block if it has one."""
    blocks = _ANSWER.findall(text)
    return blocks[-1].strip() in known if blocks else any(answer in text for answer in known)


def _alter_answer(answer: str) -> str:
    """Returns an answer that differs from this one."""
    try:
        return str(int(answer) + 1)
    except ValueError:
        return f"{answer}+1" if any(map(str.isdigit, answer)) else f"not {answer}"


# Without an environment --------------------------------------------------------------------------
class FakeSession:
    """A `rlx.rollout.SamplingSession` without a model.

    Args:
        author: writes the responses.
        problems: problems of the trees being sampled, in order.
        room: context length in tokens.
    """

    def __init__(self, author: ResponseAuthor, problems: Sequence[Problem], room: int) -> None:
        self._author, self._problems = author, problems
        self.context_length = room
        self._level = 0
        self._tree_of: list[int] = []

    def generate(
        self, requests: Sequence[CompletionRequest], sampling: TurnSpec
    ) -> list[tuple[Completion, ...]]:
        """Returns one synthetic completion per seed; the n-th call is the n-th level, where a
        schedule's own function does not call it out of order."""
        levels = self._author.plan.levels
        alike = [number for number, level in enumerate(levels) if level.turn == sampling]
        level = alike[0] if len(alike) == 1 else min(self._level, len(levels) - 1)
        trees = [
            order if request.extends is None else self._tree_of[request.extends]
            for order, request in enumerate(requests)
        ]
        groups = [
            self._author.write_response_group(
                self._problems[tree], level, request.seeds, number=number
            )
            for number, (tree, request) in enumerate(zip(trees, requests, strict=True))
        ]
        self._level += 1
        self._tree_of = [t for t, g in zip(trees, groups, strict=True) for _ in g]
        return groups


# With an environment -----------------------------------------------------------------------------
def find_script(spec: ExperimentSpec, task: Task) -> Rehearsed | None:
    """Returns the task if it can act out an episode; None if its options leave it without lessons.

    Raises:
        PluginError: the task fails.
    """
    if not isinstance(task, Rehearsed):
        return None
    try:
        with blame_plugin("task", spec.task.plugin, "lesson 0", (NotImplementedError,)):
            task.lesson(0, derive_seed(spec.seed, "warm start"))
    except NotImplementedError:
        return None
    return task


@dataclass(slots=True)
class _Actor:
    """Author of one player's turns in a game.

    Attributes:
        game: number of the game among those of all problems.
        player: 1 for the second player.
        role: the defect of its turns: "untagged" omits the tags until the forced answer, "cut" runs
            out of tokens in its first turn.
        seed: seed of the episode.
        turns: texts as they were written, before any truncation.
        observations: text of the observation after each turn.
    """

    game: int
    player: int
    problem: Problem
    role: Role
    seed: int
    turns: list[str] = field(default_factory=list)
    observations: list[str] = field(default_factory=list)


class Rehearsal:
    """A sampling session without a model, which also wraps the environment host.

    Implements `rlx.rollout.SamplingSession` and `rlx.rollout.EnvironmentHost`. Create one
    object per call of `rlx.rollout.sample_rollout_trees`.

    Args:
        author: writes the turns if there is no script.
        script: the task, if it acts itself; see `find_script`.
        problems: problems of the trees being sampled, in order.
        seeds: one per problem.
        talk: how rollouts and environment take turns.
        host: runs the environment.
        room: context length in tokens.
    """

    def __init__(
        self,
        author: ResponseAuthor,
        script: Rehearsed | None,
        problems: Sequence[Problem],
        seeds: Sequence[int],
        talk: EnvironmentPlan,
        host: EnvironmentHost,
        room: int,
    ) -> None:
        self._author, self._script = author, script
        self._problems, self._seeds = problems, seeds
        self._talk, self._host = talk, host
        self._actors: dict[tuple[int, int], _Actor] = {}
        self._live: list[_Actor] = []
        self.context_length = room

    def reset(self, calls: Sequence[tuple[Mapping[str, Any], int]]) -> list[Any]:
        """Returns the initial states of all games, problem by problem."""
        seeds = [seed for _, seed in calls]
        self._actors = {
            (game, player): self._build_actor(game, player, seeds)
            for game in range(len(calls))
            for player in range(self._talk.players)
        }
        return self._host.reset(calls)

    def _build_actor(self, game: int, player: int, seeds: Sequence[int]) -> _Actor:
        tree, place = divmod(game, self._talk.count)
        role, of = _get_role(place if self._talk.count > 1 else tree % 2), game
        if role == "twin":  # repeats the first response
            role, of = ROLES[0], tree * self._talk.count
        seed = derive_seed(seeds[of], "rehearsal", *([player] if player else []))
        return _Actor(game, player, self._problems[tree], role, seed)

    def generate(
        self, requests: Sequence[CompletionRequest], sampling: TurnSpec
    ) -> list[tuple[Completion, ...]]:
        """Returns the next turn of every unfinished game, whose actor its seed tells."""
        waiting = {self._derive_next_seed(actor): actor for actor in self._actors.values()}
        self._live = [waiting[seed] for request in requests for seed in request.seeds]
        actors = iter(self._live)
        return [
            tuple(self._take_turn(next(actors), seed, sampling) for seed in request.seeds)
            for request in requests
        ]

    def _derive_next_seed(self, actor: _Actor) -> int:
        tree, place = divmod(actor.game, self._talk.count)
        return derive_turn_seed(self._seeds[tree], place, len(actor.turns) + 1, actor.player)

    def step(self, calls: Sequence[tuple[Any, Action]]) -> list[Step | HostFault]:
        """Passes the turns to the environment and returns its steps."""
        steps = self._host.step(calls)
        for actor, step in zip(self._live, steps, strict=True):
            if isinstance(step, Step):
                player = step.player if self._talk.players > 1 else actor.player
                reader = self._actors[actor.game, player]
                if reader.turns:  # a second player's first observation is its prompt
                    following = len(reader.turns) + 1
                    text = self._talk.build_turn_text(step.observation, following)
                    reader.observations.append(join_results(step.results, text))
        return steps

    def release(self, states: Sequence[Any]) -> None:
        """Passes the states on."""
        self._host.release(states)

    def _take_turn(self, actor: _Actor, seed: int, sampling: TurnSpec) -> Completion:
        number, speech = len(actor.turns), self._author.speech
        if self._script is not None:
            what = f"`act`, turn {number + 1} of problem {actor.problem.id}"
            with blame_plugin("task", self._author.spec.task.plugin, what):
                text = self._script.act(actor.problem, actor.turns, actor.observations, actor.seed)
            text = fit_to_vocabulary(speech, text)
        else:
            drawn = derive_seed(actor.seed, number)
            confidence = f"0.{random.Random(drawn).randint(1, 9)}"
            text = self._author.write_response_text(
                actor.problem, number, drawn, actor.role, confidence
            )
            if number < min(len(self._talk.tools), self._talk.max_turns - 1):
                call = make_up_call(self._talk.tools[number])
                text = fit_to_vocabulary(speech, speech.write_call(call))
        actor.turns.append(text)
        if actor.role == "untagged" and number < self._talk.max_turns:
            bare = TAGS.sub("", text)
            text = fit_to_vocabulary(speech, bare) if bare.strip() else text
        cut = actor.role == "cut" and number == 0
        return self._author.end_response(text, sampling, cut=cut, seed=seed)


# With an agent -----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class PlanPolicy:
    """A policy without a model, for the programs of agents; a `rlx.serving.ServedPolicy`."""

    speech: PlanSpeech

    @property
    def dialogue(self) -> ModelDialogue:
        """The experiment's dialogue format, or its stand-in."""
        return self.speech.dialogue

    @property
    def tokenizer(self) -> Any:
        """The dialogue's tokenizer."""
        return self.speech.dialogue.tokenizer

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn."""
        return self.speech.dialogue.end_ids

    @property
    def vocabulary(self) -> int:
        """Number of tokens."""
        return self.speech.vocabulary or len(self.tokenizer)


class AgentRehearsal:
    """A sampling session without a model, for the programs of agents. They get the turns of the
    task's demonstrations, in order, or what fills the spans.

    Args:
        author: writes the turns.
        problems: problems of the trees being sampled, in order.
        seeds: one per problem.
        talk: how many rollouts and turns there are.
        room: context length in tokens.
    """

    def __init__(
        self,
        author: ResponseAuthor,
        problems: Sequence[Problem],
        seeds: Sequence[int],
        talk: EnvironmentPlan,
        room: int,
    ) -> None:
        self._author, self._problems, self._talk = author, problems, talk
        self.context_length = room
        self._places = {
            derive_turn_seed(seed, place, number): (tree, place, number)
            for tree, seed in enumerate(seeds)
            for place in range(talk.count)
            for number in range(1, talk.last + 1)
        }
        self._seeds = seeds

    def generate(
        self, requests: Sequence[CompletionRequest], sampling: TurnSpec
    ) -> list[tuple[Completion, ...]]:
        """Returns one turn per seed, which tells whose turn it is; where a program forks its own
        history, that of the first problem."""
        return [
            tuple(self._write_turn(seed, sampling) for seed in request.seeds)
            for request in requests
        ]

    def _write_turn(self, seed: int, sampling: TurnSpec) -> Completion:
        tree, place, number = self._places.get(seed, (0, 0, 1))
        role = _get_role(place if self._talk.count > 1 else tree % 2)
        if role == "twin":  # repeats the first response
            role, place = ROLES[0], 0
        drawn = derive_seed(self._seeds[tree], "rehearsal", place, number)
        confidence = f"0.{random.Random(drawn).randint(1, 9)}"
        demonstration = derive_seed(self._seeds[tree], "rehearsal", place)
        text = self._author.write_response_text(
            self._problems[tree], number - 1, demonstration, role, confidence
        )
        if role == "untagged":
            text = fit_to_vocabulary(self._author.speech, TAGS.sub("", text)) or text
        is_cut = role == "cut" and number == 1
        return self._author.end_response(text, sampling, cut=is_cut, seed=drawn)
