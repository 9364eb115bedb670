"""A trial of one phase: synthetic responses, with rewards and credit by the experiment's code."""

import random
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from tokenizers import AddedToken
from torch import Tensor
from torch.nn.functional import pad

from rlx.agents import build_rollout_host
from rlx.credit import CreditInputs, TurnWithoutTokens, structured_scores
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
from rlx.phase_setup import PhaseSetup
from rlx.plan.memory import (
    MemoryEstimate,
    ModelShape,
    TokenBudget,
    estimate_step_memory,
    load_model_shape,
    token_budget,
)
from rlx.plugin import Action, Problem, Rehearsed, StandsIn, Step, Task
from rlx.plugin_calls import blame_plugin, show_plugin_output
from rlx.reward import RewardPool, RewardTable, score_rollouts
from rlx.rollout import (
    Completion,
    CompletionRequest,
    EnvironmentHost,
    EnvironmentPlan,
    HostFault,
    RolloutPlan,
    RolloutTree,
    derive_turn_seed,
    fill_turn_template,
    join_results,
    make_up_call,
    sample_rollout_trees,
)
from rlx.seeding import derive_seed
from rlx.spec import ExperimentSpec, PhaseSpec, TinyModelSpec, TurnSpec
from rlx.step import (
    ScoredRows,
    TokenStreams,
    TrainBatch,
    assign_credit,
    build_scored_rows,
    find_lost_rows,
)
from rlx_registry import STREAMS, TokenStream

# Tokenizers --------------------------------------------------------------------------------------
_PIECE = re.compile(r" ?[^\W\d_]{1,8}|\d| ?[^\w\s]|\s|_")
"""Short words with the space before them, single digits, single signs: roughly how large byte-level
vocabularies split a text."""
_TAGS = re.compile(r"(</?[A-Za-z_][\w-]*>)")


class WordVocabulary(Vocabulary):
    """Words, digits and signs of the texts that it has encoded; new ones become part of it."""

    END = "<|endoftext|>"
    unk_token_id = None
    added_tokens_decoder: ClassVar[Mapping[int, AddedToken]] = {0: AddedToken(END, special=True)}

    def __init__(self) -> None:
        self._ids = {self.END: 0}

    def __len__(self) -> int:
        return len(self._ids)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [self._ids.setdefault(one, len(self._ids)) for one in _PIECE.findall(text)]

    def decode(self, ids: Sequence[int], **_: bool) -> str:
        pieces = list(self._ids)
        return "".join(pieces[token] for token in ids)


@dataclass(frozen=True, slots=True)
class PlanSpeech:
    """The dialogue of the experiment's model, a `rlx.serving.ServedPolicy` for programs of agents;
    `note` is what stands in for its tokenizer, or ""."""

    dialogue: ModelDialogue
    note: str = ""

    @property
    def tokenizer(self) -> Any:
        return self.dialogue.tokenizer

    @property
    def end_ids(self) -> tuple[int, ...]:
        return self.dialogue.end_ids

    @property
    def vocabulary(self) -> int:
        return len(self.dialogue.tokenizer)


def load_speech(spec: ExperimentSpec, plugins: ExperimentPlugins) -> PlanSpeech:
    """Loads the dialogue of the experiment's model, or a stand-in for it; raises SpecError or
    EnvironmentFault for a tokenizer that is here but cannot be used."""
    model = spec.model
    if not isinstance(model, TinyModelSpec):
        if (dialogue := load_local_dialogue(model)) is not None:
            return PlanSpeech(dialogue)
        lack = f"model.path: the tokenizer of {model.path!r} is not on this machine"
        if find_gguf_file(model) is not None:
            lack = f"model.path: a run, or `rlx plan --try`, converts {model.path!r} first"
    else:
        try:
            return PlanSpeech(build_vocabulary_dialogue(choose_vocabulary(spec, plugins)))
        except (OSError, ImportError, ValueError) as error:  # the plan of the problems reports it
            if model.tokenizer is None:
                return PlanSpeech(build_vocabulary_dialogue(load_vocabulary(model)))
            lack = f"model.tokenizer: texts to train it on are missing ({summarize_error(error)})"
    note = f"{lack}; words, digits and signs stand in for its tokens, so their counts are estimates"
    return PlanSpeech(PlainDialogue(WordVocabulary(), (0,)), note)


def fit_to_vocabulary(speech: ModelDialogue, text: str) -> str:
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
        for part in _TAGS.split(text)
    )
    for between in (r"(?<=\d)(?=\d)", r"(?<=[0-9])(?=\.)|(?<=\.)(?=[0-9])"):
        if not is_known(known):
            known = re.sub(between, " ", known)
    return known


# Problems ----------------------------------------------------------------------------------------
class PlanProblems(NamedTuple):
    """The task's problems, or placeholders; `note` is what replaces them and why, or ""."""

    problems: tuple[Problem, ...]
    note: str = ""


def load_plan_problems(spec: ExperimentSpec, task: Task, count: int) -> PlanProblems:
    """The first training problems of an experiment, or placeholders if its data are missing; raises
    SpecError if they do not match the options."""
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
    names = getattr(task, "fields", None)
    names = names if isinstance(names, Mapping) else ("question", "answer")
    fields = {name: answer if _TRUTHS.search(name) else question for name in names}
    try:
        prompt = str(getattr(task, "prompt", "{question}")).format(**fields)
    except (LookupError, ValueError):
        prompt = question
    return Problem(id=f"stand-in/{number}", prompt=prompt, fields=fields)


_TRUTHS = re.compile(r"answer|truth|solution|label|target|gold", re.IGNORECASE)


def find_right_answers(fields: Mapping[str, Any]) -> list[str]:
    """Lists the values in a problem's record that look like a right answer, likeliest first.

    `solution` comes before `answer`, because a record with both holds the working in one and the
    result in the other. Of a GSM8K-style answer only the text after `####` is taken.
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
Role = Literal["good", "poor", "untagged", "cut", "twin", "any"]
_ROLES: tuple[Role, ...] = ("good", "poor", "untagged", "cut", "twin")
"""Of a group's first responses: what training meets with any model. One is without tags, one ran
out of tokens, and the twin repeats the first."""
_DRAWS = 24
"""Demonstrations to try when looking for a good or a poor one."""
_TAG_LINES = re.compile(r"\s*(?:</?[A-Za-z_][\w-]*>\s*)+")
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_CONFIDENCE = re.compile(r"<confidence>.*?</confidence>", re.DOTALL)


def _get_role(place: int) -> Role:
    return _ROLES[place] if place < len(_ROLES) else "any"


@dataclass(frozen=True, slots=True)
class ResponseAuthor:
    """Writes the synthetic responses of an experiment."""

    plan: RolloutPlan
    spec: ExperimentSpec
    task: Task
    speech: ModelDialogue

    def write_text(
        self, problem: Problem, number: int, seed: int, role: Role, confidence: str
    ) -> str:
        """Returns a matching demonstration of the task, otherwise the spans of turn `number` (from
        0) filled in, with this confidence if it states one."""
        talk = self.plan.talk
        turn = self.plan.levels[number].turn if talk is None else talk.sampling(number + 1)
        answers = number == self.plan.answer_level or talk is not None
        known = find_right_answers(problem.fields) if answers else []
        poor = role == "poor"
        right = known[0] if known else "42"
        answer = _alter_answer(right) if poor else right
        contents = dict.fromkeys(turn.spans, f"Let me see: {answer}")
        stated = [name for name in turn.spans if name not in ("think", "analysis", "confidence")]
        contents |= dict.fromkeys(stated[-1:], answer)
        contents |= {name: confidence for name in turn.spans if name == "confidence"}
        spans = {name: f"<{name}>{text}</{name}>" for name, text in contents.items()}
        loose = role == "any" or not known
        demonstrations = self._list_demonstrations(problem, number, seed)
        text = next((t for t in demonstrations if loose or _is_right(t, known) != poor), None)
        if text is None:
            bare = answer if answers else confidence
            return fit_to_vocabulary(self.speech, "\n".join(spans.values()) or bare)
        text = _CONFIDENCE.sub(f"<confidence>{confidence}</confidence>", text)
        whole = fit_to_vocabulary(self.speech, _add_missing_spans(text, spans))
        return whole if len(self.speech.encode(whole)) < turn.max_new_tokens else text

    def _list_demonstrations(self, problem: Problem, number: int, seed: int) -> Iterator[str]:
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

    def end_response(self, text: str, turn: TurnSpec, role: Role, seed: int) -> Completion:
        """Encodes a text, ended as the turn's settings would end it; without its tags, or cut in
        the middle, if that is its role."""
        if role == "untagged":
            bare = _TAG_LINES.sub("\n", text).strip()
            text = fit_to_vocabulary(self.speech, bare) or text
        stops = [at + len(stop) for stop in turn.stop if (at := text.find(stop)) >= 0]
        ids = self.speech.encode((text[: min(stops)] if stops else text).removeprefix(turn.prefix))
        if not stops:
            ids = (*ids, self.speech.end_ids[0])
        most = turn.max_new_tokens
        kept = ids[: min(most, max(1, len(ids) // 2)) if role == "cut" else most]
        rng = random.Random(seed)
        logprobs = tuple(-rng.expovariate(3.0) for _ in kept)
        return Completion(kept, logprobs, "stop" if len(kept) == len(ids) else "length")


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
    try:
        return str(int(answer) + 1)
    except ValueError:
        return f"{answer}+1" if any(map(str.isdigit, answer)) else f"not {answer}"


# Sessions ----------------------------------------------------------------------------------------
class TreeSession:
    """A `rlx.rollout.SamplingSession` without a model, for schedules without an environment, with a
    context of `room` tokens."""

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
            self._write_group(self._problems[tree], level, request.seeds, number)
            for number, (tree, request) in enumerate(zip(trees, requests, strict=True))
        ]
        self._level += 1
        self._tree_of = [t for t, g in zip(trees, groups, strict=True) for _ in g]
        return groups

    def _write_group(
        self, problem: Problem, level: int, seeds: Sequence[int], number: int
    ) -> tuple[Completion, ...]:
        """Returns the responses below context `number`, one per seed; with one response per
        context, every other one is poor."""
        turn = self._author.plan.levels[level].turn
        tenths = random.Random(seeds[0]).sample(range(1, 10), 9)
        written: list[Completion] = []
        for place, seed in enumerate(seeds):
            role = _get_role(place if len(seeds) > 1 else number % 2)
            if role == "twin":
                written.append(written[0])
                continue
            confidence = f"0.{tenths[place % len(tenths)]}"
            text = self._author.write_text(problem, level, seed, role, confidence)
            written.append(self._author.end_response(text, turn, role, seed))
        return tuple(written)


def find_script(spec: ExperimentSpec, task: Task) -> Rehearsed | None:
    """Returns the task if it can act out an episode; None if its options give it no lessons."""
    if not isinstance(task, Rehearsed):
        return None
    try:
        with blame_plugin("task", spec.task.plugin, "lesson 0", (NotImplementedError,)):
            task.lesson(0, derive_seed(spec.seed, "warm start"))
    except NotImplementedError:
        return None
    return task


class DialogueSession(EnvironmentHost):
    """A `rlx.rollout.SamplingSession` without a model, for the programs of agents, and for an
    environment, whose `host` it wraps: the task's `script`, if it acts itself, hears what it
    answers. It serves one call of `rlx.rollout.sample_rollout_trees`.

    Args:
        problems: problems of the trees being sampled, in order, with one of the `seeds` each.
        room: context length in tokens.
    """

    def __init__(
        self,
        author: ResponseAuthor,
        problems: Sequence[Problem],
        seeds: Sequence[int],
        talk: EnvironmentPlan,
        room: int,
        host: EnvironmentHost | None = None,
        script: Rehearsed | None = None,
    ) -> None:
        self._author, self._problems, self._talk = author, problems, talk
        self.context_length = room
        self._host, self._script = host, script
        self._seeds = seeds
        self._places = {
            derive_turn_seed(seed, place, number + 1, player): (tree, place, number, player)
            for tree, seed in enumerate(seeds)
            for place in range(talk.count)
            for number in range(talk.last)
            for player in range(talk.players)
        }
        self._live: list[tuple[int, int]] = []
        self._said: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
        self._heard: defaultdict[tuple[int, int], list[str]] = defaultdict(list)

    def generate(
        self, requests: Sequence[CompletionRequest], sampling: TurnSpec
    ) -> list[tuple[Completion, ...]]:
        """Returns one turn per seed, which tells whose turn it is; one that a program forks off is
        of the first problem."""
        self._live = []
        return [
            tuple(self._take_turn(seed, sampling) for seed in request.seeds) for request in requests
        ]

    def _take_turn(self, seed: int, sampling: TurnSpec) -> Completion:
        tree, place, number, player = self._places.get(seed, (0, 0, 0, 0))
        self._live.append((tree * self._talk.count + place, player))
        role = _get_role(place if self._talk.count > 1 else tree % 2)
        if role == "twin":  # repeats the first response
            role, place = _ROLES[0], 0
        episode = derive_seed(self._seeds[tree], "environment", place)
        episode = derive_seed(episode, "rehearsal", *([player] if player else []))
        text = self._write_turn(self._problems[tree], number, episode, role)
        late = (role == "cut" and number > 0) or number >= self._talk.max_turns
        return self._author.end_response(text, sampling, "any" if late else role, seed)

    def _write_turn(self, problem: Problem, number: int, episode: int, role: Role) -> str:
        said, speech = self._said[self._live[-1]], self._author.speech
        if self._script is not None:
            what = f"`act`, turn {number + 1} of problem {problem.id}"
            with blame_plugin("task", self._author.spec.task.plugin, what):
                text = self._script.act(problem, said, self._heard[self._live[-1]], episode)
            text = fit_to_vocabulary(speech, text)
        elif number < min(len(self._talk.tools), self._talk.max_turns - 1):
            call = speech.write_call(make_up_call(self._talk.tools[number]))
            text = fit_to_vocabulary(speech, call)
        else:
            confidence = f"0.{random.Random(derive_seed(episode, number)).randint(1, 9)}"
            text = self._author.write_text(problem, number, episode, role, confidence)
        said.append(text)
        return text

    def reset(self, calls: Sequence[tuple[Mapping[str, Any], int]]) -> list[Any]:
        assert self._host is not None
        return self._host.reset(calls)

    def step(self, calls: Sequence[tuple[Any, Action]]) -> list[Step | HostFault]:
        assert self._host is not None
        steps = self._host.step(calls)
        for (game, player), step in zip(self._live, steps, strict=True):
            if isinstance(step, Step):
                reader = game, step.player if self._talk.players > 1 else player
                if said := self._said[reader]:  # a second player's first observation is its prompt
                    text = self._talk.build_turn_text(step.observation, len(said) + 1)
                    self._heard[reader].append(join_results(step.results, text))
        return steps

    def release(self, states: Sequence[Any]) -> None:
        assert self._host is not None
        self._host.release(states)


# A trial ------------------------------------------------------------------------------------------
_ROWS_PER_PROMPT = 512
"""Rows per prompt above which a trial samples smaller groups than the experiment."""
Place = tuple[int, int]
"""(tree, segment)."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PlanTrial:
    """Synthetic rollouts of the phases that have the settings of `setup`.

    Attributes:
        note: what stands in for the task's problems; "" if they are its own.
        shape: None if unknown on this machine.
        table: rewards of the sampled `trees`; `rewards` are the same as tensors.
        train: None, like `rewards`, if nothing could be scored.
        stopped: why credit could not be assigned; "" if it was.
    """

    setup: PhaseSetup
    phases: tuple[PhaseSpec, ...] = ()
    note: str = ""
    shape: ModelShape | None
    trees: list[RolloutTree]
    table: RewardTable
    is_scripted: bool = False
    rewards: CreditInputs | None = None
    train: TrainBatch | None = None
    made_up: tuple[str, ...] = ()
    stopped: str = ""

    @cached_property
    def tokens(self) -> TokenBudget:
        """Tokens of a step."""
        return token_budget(self.setup, self.trees)

    @cached_property
    def memory(self) -> MemoryEstimate | None:
        """What a step needs of a rank; None without a `shape`."""
        shape = self.shape
        return None if shape is None else estimate_step_memory(self.setup, shape, self.tokens)

    @property
    def faults(self) -> dict[Place, str]:
        """Environment faults, by the turn or prompt that caused them."""
        return {
            (t, segment.parent): str(segment.info["fault"])
            for t, tree in enumerate(self.trees)
            for segment in tree.segments
            if segment.author == "environment" and "fault" in segment.info
        }

    @property
    def is_faulty(self) -> bool:
        """A plugin failed, so later results mean little."""
        return bool(self.faults or self.table.faults)

    @property
    def unfinished_turns(self) -> tuple[Place, ...]:
        """Last turns of rollouts that ended before the environment was done."""
        faults, places = self.faults, []
        for t, tree in enumerate(self.trees):
            continued = {segment.parent for segment in tree.segments}
            places += [
                (t, segment.parent)
                for at, segment in enumerate(tree.segments)
                if segment.author == "environment" and at not in continued
            ]
        return tuple(place for place in places if place not in faults)

    @property
    def stuck_plugin(self) -> str:
        """Describes the plugin that missed its deadline; "" if none did."""
        if any(fault.startswith("deadline") for fault in self.faults.values()):
            return "the environment" if self.setup.plan.agent is None else "the agent"
        places = (*self.table.turns.values(), *self.table.rollouts.values())
        entries = (entry for named in places for entry in named.values())
        late = any(e.is_fault and (e.reason or "").startswith("deadline") for e in entries)
        return "a scorer" if late else ""


def run_trial(
    setup: PhaseSetup, problems: PlanProblems, loaded: PlanSpeech, pool: RewardPool
) -> PlanTrial:
    """Samples synthetic rollouts in the shape of the phase and assigns credit to them.

    One rollout runs first, so that a hanging plugin costs one deadline instead of one per sample.

    Raises:
        PluginError, SpecError: the task's script, mask or estimator fails, or a text has no tokens.
        EnvironmentFault: reward workers do not start.
    """
    speech, asked, note = loaded.dialogue, list(problems.problems), problems.note
    if note:  # the task's own prompts must encode unchanged
        asked = [
            replace(p, prompt=fit_to_vocabulary(speech, fill_turn_template(speech, "{prompt}", p)))
            for p in asked
        ]
    whole = setup.plan
    if whole.talk is not None:  # faults are recorded and do not end the plan
        whole = replace(whole, talk=replace(whole.talk, on_error="drop_sample"))
    rewards = [
        replace(one, use=one.use.model_copy(update={"on_error": "drop_sample"}))
        if one.use.on_error == "fail"
        else one
        for one in setup.rewards
    ]
    script = None if whole.talk is None or note else find_script(setup.spec, setup.task)
    shape = load_model_shape(setup.spec.model, loaded.vocabulary)

    def sample_and_score(plan: RolloutPlan, problems: Sequence[Problem]) -> PlanTrial:
        seeds = [derive_seed(setup.spec.seed, "plan", i) for i in range(len(problems))]
        room = (shape and shape.positions) or sys.maxsize
        author = ResponseAuthor(plan, setup.spec, setup.task, speech)
        host = build_rollout_host(setup, pool, loaded)
        session: TreeSession | DialogueSession
        if plan.talk is None:
            session = TreeSession(author, problems, room)
        elif isinstance(host, EnvironmentHost):
            session = host = DialogueSession(author, problems, seeds, plan.talk, room, host, script)
        else:
            session = DialogueSession(author, problems, seeds, plan.talk, room)
        trees = sample_rollout_trees(plan, problems, seeds, session, speech, host)
        return PlanTrial(
            setup=setup,
            note=note,
            shape=shape,
            trees=trees,
            table=score_rollouts(trees, rewards, pool),
            is_scripted=script is not None,
        )

    first = sample_and_score(whole.copy_with_siblings(1), asked[:1])
    if first.stuck_plugin:
        return replace(first, stopped=f"{first.stuck_plugin} hangs on the first rollout")
    most = max(level.count for level in whole.levels)
    while whole.rows_per_prompt > _ROWS_PER_PROMPT and most > 2:
        most //= 2
        whole = whole.copy_with_siblings(most)
    return _assign_trial_credit(sample_and_score(whole, asked))


def _assign_trial_credit(trial: PlanTrial) -> PlanTrial:
    spec = trial.setup.spec
    setup, what = trial.setup, "synthetic rollouts"
    setup = replace(
        setup,
        mask=blame_plugin("mask", spec.mask.plugin, what)(setup.mask),
        estimator=blame_plugin("estimator", spec.estimator.plugin, what)(setup.estimator),
    )
    lost = find_lost_rows(trial.trees, trial.table, needs_reward=spec.learns_from_rewards)
    rows = build_scored_rows(setup, trial.trees, trial.table, without=lost)
    if rows is None:
        return replace(trial, stopped="no rollout could be scored")
    streams, made_up = _sample_streams(setup, rows)
    try:
        train = assign_credit(rows, streams, setup.rules)
    except TurnWithoutTokens as error:
        return replace(trial, rewards=rows.rewards, stopped=str(error))
    return replace(trial, rewards=rows.rewards, train=train, made_up=made_up)


def _sample_streams(setup: PhaseSetup, rows: ScoredRows) -> tuple[TokenStreams, tuple[str, ...]]:
    draw = torch.Generator().manual_seed(derive_seed(setup.spec.seed, "plan", "streams"))
    providers = {STREAMS[need].provider for need in setup.needs if need in STREAMS}
    optional = {
        stream.name: _sample_stream(stream, rows, draw)
        for stream in STREAMS.values()
        if stream.is_optional and stream.provider in providers
    }
    behaviour, beta = rows.batch.behaviour_logprobs, setup.spec.credit.kl_coef
    titles = (STREAMS[name].title or name.replace("_", " ") for name in optional)
    made_up = ("responses", "behaviour log-probabilities", *titles)
    return TokenStreams(old_logprobs=behaviour, optional=optional, beta=beta), made_up


def _sample_stream(stream: TokenStream, rows: ScoredRows, draw: torch.Generator) -> Tensor:
    """Synthetic values of one stream; every row is one reasoning step."""
    behaviour, rewards = rows.batch.behaviour_logprobs, rows.rewards
    if stream.dtype == "int64":
        return torch.where(rows.batch.is_own, 0, -1)
    if stream.shape == "[B]":
        parts = (rewards.turn_rewards, rewards.turn_present, rewards.global_rewards)
        return structured_scores(*parts).mean().expand(len(behaviour))
    if stream.shape == "[B, S + 1]":  # nothing is left to gain in the last state
        return pad(0.5 + 0.1 * torch.randn(len(behaviour), 1, generator=draw), (0, 1))
    around = behaviour if stream.unit == "nats" else 0.5
    return around + 0.1 * torch.randn(behaviour.shape, generator=draw)
