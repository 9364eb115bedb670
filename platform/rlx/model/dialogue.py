"""Encodes and decodes dialogues, as plain text or through a chat template."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from rlx.errors import PluginError, SpecError
from rlx.model.vocabulary import Vocabulary
from rlx.plugin import Environment, Message, Problem, Rehearsed, Step, Task, ToolCall
from rlx.rollout import (
    RESULT,
    RESULT_END,
    EnvironmentPlan,
    LocalHost,
    ReadReply,
    Schema,
    TurnPrompt,
    build_call,
    build_talk,
    count_shared,
    describe_tools,
    encode_between_turns,
    encode_opening,
    fill_turn_template,
    find_spans,
    join_results,
    list_example_messages,
    make_up_call,
    read_calls,
    read_turn,
    remove_prefix,
    write_call,
)
from rlx.seeding import derive_seed
from rlx.spec import EnvironmentRolloutSpec, ExperimentSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NEARBY = 200
"""Characters shown on each side of what a tokenizer cannot write."""
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What an incomplete UTF-8 sequence decodes to."""

TEMPLATE_DAY: Final = datetime(2025, 1, 1)
"""The date that chat templates get for today's: prompts are the same tomorrow."""


def _refuse_template(what: str) -> SpecError:
    return SpecError(
        f"the model's chat template {what}; set model.chat_template: false to use plain text"
    )


class _DialogueBase(ABC):
    """Encodes text and decodes turns, in every dialogue format; see `rlx.rollout.Dialogue`."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase | Vocabulary", end_ids: Sequence[int]
    ) -> None:
        self.tokenizer: Any = tokenizer
        self._pieces: dict[int, str] = {}
        added = tokenizer.added_tokens_decoder.values()
        self._control = [token.content for token in added if token.special]
        self.end_ids = tuple(end_ids)

    def read(self, token_ids: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """Returns the text without the end token, and the characters decoded after every token."""
        content = list(token_ids)
        if self._is_closed(content):
            content.pop()
        text = self.decode_tokens(content)
        ends = self._ends(content, text)
        return text, (*ends, *[len(text)] * (len(token_ids) - len(content)))

    def encode(self, text: str) -> tuple[int, ...]:
        """Returns the tokens of `text`, without special tokens.

        Raises:
            SpecError: the vocabulary has no token for part of the text.
        """
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        unknown = self.tokenizer.unk_token_id
        # Byte-level vocabularies can encode everything, and often use the end token as unk token.
        if unknown is not None and unknown in ids and unknown not in self.end_ids:
            raise SpecError(
                f"the tokenizer of this model has no token for {self._describe(text, unknown)}: "
                "choose task options whose text it can encode, or use another model"
            )
        return tuple(ids)

    def encode_observation(
        self, text: str, after: Sequence[int], *, inline: bool, prefix: str = ""
    ) -> TurnPrompt:
        text = self.break_control_tokens(text)
        ids = self.encode(text + prefix) if inline else self.reply(text, after, prefix)
        return TurnPrompt(text, ids)

    def break_control_tokens(self, text: str) -> str:
        for token in self._control:
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    @abstractmethod
    def reply(self, text: str, after: Sequence[int], prefix: str = "") -> tuple[int, ...]:
        """See `rlx.rollout.Dialogue`."""

    def read_reply(self, text: str, context: Sequence[int], tools: Sequence[Schema]) -> ReadReply:
        """Reads calls as the tokenizer says (`parse_response`), or else as JSON, or a function in
        tags, between `<tool_call>` and `</tool_call>`."""
        if getattr(self.tokenizer, "response_template", None) is None:
            return read_calls(text, tools, bare=self._writes_bare_calls)
        before = self.decode_tokens(context)
        try:
            found = self.tokenizer.parse_response(text, prefix=before, tools=list(tools))
        except ValueError as error:  # the model did not keep to its own form
            return ReadReply(text, (ToolCall("", fault=str(error)),))
        calls = [
            build_call(call["function"]["name"], call["function"].get("arguments", {}))
            for call in found.get("tool_calls") or ()
        ]
        reasoning = found.get("reasoning_content") or found.get("thinking")
        return ReadReply(found.get("content") or "", tuple(calls), reasoning)

    @property
    def _writes_bare_calls(self) -> bool:
        """Whether a call is a turn that is JSON and nothing else."""
        return False

    def piece(self, token: int) -> str:
        """Decodes a single token."""
        if token not in self._pieces:
            self._pieces[token] = self.decode_tokens([token])
        return self._pieces[token]

    def _describe(self, text: str, token: int) -> str:
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        start, stop = encoding["offset_mapping"][encoding["input_ids"].index(token)]
        before, after = max(0, start - NEARBY), stop + NEARBY
        left, right = "…" if before else "", "…" if after < len(text) else ""
        return f"{text[start:stop]!r} in {left}{text[before:after]!r}{right}"

    def decode_tokens(self, ids: Sequence[int]) -> str:
        """Decodes tokens; special tokens decode to their names."""
        return str(
            self.tokenizer.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def _is_closed(self, turn: Sequence[int]) -> bool:
        return bool(turn) and turn[-1] in self.end_ids

    def _ends(self, ids: Sequence[int], text: str) -> list[int]:
        """Returns the lengths of the decoded prefixes.

        Tokens that decode to the same text one by one are summed. Otherwise (a character split over
        several tokens, spaces that depend on the context) each is decoded after the tokens before
        it, and a character counts from the token that completes it.
        """
        pieces = [self.piece(i) for i in ids]
        if "".join(pieces) == text:
            return list(accumulate(map(len, pieces)))
        lengths, total = [], 0
        before = start = 0  # ids[before:start] are complete characters, ids[start:] may not be
        for stop in range(1, len(ids) + 1):
            known = len(self.decode_tokens(ids[before:start]))
            fresh = self.decode_tokens(ids[before:stop])[known:]
            whole = fresh.rstrip(INCOMPLETE)
            lengths.append(total + len(whole))
            if whole == fresh:
                total += len(whole)
                before, start = start, stop
        return lengths


class PlainDialogue(_DialogueBase):
    """Concatenates turns as plain text; a turn ends with the first of the end tokens.

    A dialogue begins with what the tokenizer's own call puts before a text, such as BOS. What it
    puts behind a text (EOS) would end the dialogue and is left out.

    Raises:
        SpecError: its call does not put tokens around a text but changes the text's own.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase | Vocabulary", end_ids: Sequence[int]
    ) -> None:
        super().__init__(tokenizer, end_ids)
        bare, whole = (list(tokenizer.encode("a", add_special_tokens=s)) for s in (False, True))
        starts = range(len(whole) - len(bare) + 1)
        found = next((at for at in starts if whole[at : at + len(bare)] == bare), None)
        if found is None:
            raise SpecError(
                "model: the tokenizer's own call changes the tokens of a text, so rlx cannot tell "
                "with which tokens a dialogue begins; set model.chat_template: true"
            )
        self._beginning = tuple(whole[:found])

    def open(
        self,
        text: str,
        system: str = "",
        history: Sequence[Message] = (),
        prefix: str = "",
        tools: Sequence[Schema] = (),
    ) -> tuple[int, ...]:
        """Encodes system message, tools, earlier turns and the text, and begins the dialogue."""
        if tools:
            system = _prepend_system_message(describe_tools(tools), system)
        texts = [*(message.content for message in history), text]
        texts[0] = _prepend_system_message(texts[0], system)
        texts[-1] += prefix
        return self._append_turns((*self._beginning, *self.encode(texts[0])), texts[1:])

    def _append_turns(self, ids: tuple[int, ...], texts: Sequence[str]) -> tuple[int, ...]:
        """Appends turns of the assistant, each with what the user says after it."""
        for said, following in zip(texts[::2], texts[1::2], strict=True):
            turn = self.encode(said)
            ids += (*turn, *self.reply(following, turn))
        return ids

    def open_text(self, text: str) -> tuple[tuple[int, ...], int]:
        """Returns the tokens of a text that a model continues, and how many of them begin it."""
        return (*self._beginning, *self.encode(text)), len(self._beginning)

    def open_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[int, ...]:
        """Encodes messages: one of the system, if any, then the user's and the assistant's in turn.

        Raises:
            SpecError: there are other messages, or tools.
        """
        has_system = messages[0]["role"] == "system"
        system, talk = messages[0]["content"] if has_system else "", messages[has_system:]
        if tools or not _take_turns(talk):
            raise SpecError(
                "this model has no chat template: its messages are one of the system, if any, and "
                "then those of user and assistant in turn, the user's last, without tools"
            )
        history = [Message(message["role"], message["content"]) for message in talk[:-1]]
        return self.open(talk[-1]["content"], system, history)

    def follow_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        after: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[int, ...]:
        """Encodes messages after a turn: the user's and the assistant's in turn, the user's last.

        Raises:
            SpecError: there are other messages, or tools.
        """
        if tools or not _take_turns(messages):
            raise SpecError(
                "this model has no chat template: after a turn, its messages are those of user and "
                "assistant in turn, the user's first and last, without tools"
            )
        asked, *texts = (message["content"] for message in messages)
        return self._append_turns(self.reply(asked, after), texts)

    def reply(self, text: str, after: Sequence[int], prefix: str = "") -> tuple[int, ...]:
        """Encodes the text, after an end token if the turn `after` has none."""
        return (*(() if self._is_closed(after) else self.end_ids[:1]), *self.encode(text + prefix))

    def encode_results(
        self,
        results: Sequence[tuple[ToolCall, str]],
        text: str,
        after: Sequence[int],
        tools: Sequence[Schema],
        prefix: str = "",
    ) -> TurnPrompt:
        """Encodes each result between its tags, and then the text."""
        shown = [self.break_control_tokens(result) for _, result in results]
        text = self.break_control_tokens(text)
        framed = "".join(f"{RESULT}{result}{RESULT_END}\n" for result in shown)
        return TurnPrompt(join_results(shown, text), self.reply(framed + text, after, prefix))

    def write_call(self, call: ToolCall) -> str:
        """Writes it as JSON between `<tool_call>` and `</tool_call>`."""
        return write_call(call)

    def check_tools(self, tools: Sequence[Schema]) -> None:
        """Plain text holds everything."""


class ChatDialogue(_DialogueBase):
    """Formats turns with the tokenizer's chat template.

    The template renders only the text around sampled turns, never the turns themselves: the text
    after a turn is what the template renders after a placeholder for the turn. The template's own
    end of a turn is the first of the end tokens.

    Raises:
        SpecError: the template cannot be used in this way.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", end_ids: Sequence[int]) -> None:
        super().__init__(tokenizer, end_ids)
        word = _build_placeholder("")
        shown = [_build_message("system", word), _build_message("user", "?")]
        try:  # some templates reject system messages, some drop them
            self._takes_system = word in self._render(shown)
        except SpecError:
            self._takes_system = False
        self._closing = self._closing_ids()
        self.end_ids = tuple(dict.fromkeys((*self._closing[-1:], *end_ids)))

    def open(
        self,
        text: str,
        system: str = "",
        history: Sequence[Message] = (),
        prefix: str = "",
        tools: Sequence[Schema] = (),
    ) -> tuple[int, ...]:
        """Encodes the messages and the header of the first turn, templated, and the prefix."""
        messages = [_build_message(message.role, message.content) for message in history]
        messages.append(_build_message("user", text))
        if system and self._takes_system:
            messages.insert(0, _build_message("system", system))
        elif system:
            messages[0]["content"] = _prepend_system_message(messages[0]["content"], system)
        return self.encode(self._render(messages, tools) + prefix)

    def encode_results(
        self,
        results: Sequence[tuple[ToolCall, str]],
        text: str,
        after: Sequence[int],
        tools: Sequence[Schema],
        prefix: str = "",
    ) -> TurnPrompt:
        """Encodes what the template writes after the turn for the messages with the results."""
        shown = [self.break_control_tokens(result) for _, result in results]
        text = self.break_control_tokens(text)
        messages = [
            {"role": "tool", "name": call.name, "content": result}
            for (call, _), result in zip(results, shown, strict=True)
        ]
        messages += [_build_message("user", text)] if text else []
        ids = self.follow_chat(messages, after, tools)
        return TurnPrompt(join_results(shown, text), (*ids, *self.encode(prefix)))

    def write_call(self, call: ToolCall) -> str:
        """Writes it as the template writes the calls of earlier turns.

        Raises:
            SpecError: the template does not write calls.
        """
        called = {"name": call.name, "arguments": dict(call.arguments)}
        told = _build_message("assistant", _build_placeholder(repr(called)))
        tool_calls = [{"id": "call00000", "type": "function", "function": called}]
        message = {"role": "assistant", "content": "", "tool_calls": tool_calls}
        written, around = (
            self._render([_build_message("user", "?"), each], prompt=False)
            for each in (message, told)
        )
        start = count_shared((written, around))
        stop = count_shared((written[start:][::-1], around[start:][::-1]))
        text = written[start : len(written) - stop].strip()
        if call.name not in text:
            raise _refuse_template("does not write calls of tools")
        return text

    @cached_property
    def _writes_bare_calls(self) -> bool:
        call = ToolCall("rlxtool", {"key": "value"})
        try:
            written = self.write_call(call)
        except SpecError:
            return False
        return bool(read_calls(written, (), bare=True).calls)

    def check_tools(self, tools: Sequence[Schema]) -> None:
        """Checks that the template writes tools and results, and that its calls can be read.

        Raises:
            SpecError: it does not, or they cannot be read.
        """
        call, word = make_up_call(tools[0]), _build_placeholder("")
        opened = self.open_chat([_build_message("user", "?")], tools)
        shown = self.encode_results([(call, word)], "", (), tools).token_ids
        if word not in self.decode_tokens(shown):
            raise _refuse_template("does not write results of tools")
        if self.read_reply(self.write_call(call), opened, tools).calls != (call,):
            raise _refuse_template(
                "writes calls of tools in a form that only a tokenizer with a response_template "
                "reads, which this one has not"
            )

    def open_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[int, ...]:
        """Encodes messages and tools as the template writes them, up to the start of a turn.

        Args:
            messages: each with `role`, `content`, and what else the template reads; not empty.
            tools: functions in OpenAI's form: `{"type": "function", "function": {...}}`.

        Raises:
            SpecError: the template refuses the messages, or does not write the tools.
        """
        text = self._render(messages, tools)
        if tools and text == self._render(messages):
            raise _refuse_template("does not write tools")
        return self.encode(text)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        prompt: bool = True,
    ) -> str:
        from jinja2 import TemplateError  # imported here: most dialogues have no template

        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages),
                    tools=list(tools) or None,
                    tokenize=False,
                    add_generation_prompt=prompt,
                    strftime_now=TEMPLATE_DAY.strftime,  # in place of the clock's
                )
            )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise _refuse_template(f"refuses these messages ({error})") from error

    def reply(self, text: str, after: Sequence[int], prefix: str = "") -> tuple[int, ...]:
        """Encodes what closes the turn `after`, the text, and the next turn's header.

        A turn without an end token is closed as the template does it, or with the first end token
        if the template does not close turns.
        """
        suffix = self._render_suffix([_build_message("user", text)])
        return self._close_turn(self.encode(suffix + prefix), after)

    def follow_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        after: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[int, ...]:
        """Encodes what closes the turn `after`, messages as in `open_chat`, and the next turn's
        header.

        Raises:
            SpecError: the template refuses the messages, or does not reproduce a turn verbatim.
        """
        return self._close_turn(self.encode(self._render_suffix(messages, tools)), after)

    def _close_turn(self, ids: tuple[int, ...], after: Sequence[int]) -> tuple[int, ...]:
        """What follows the turn `after`, from what the template writes after a turn."""
        if self._is_closed(after):
            return ids[len(self._closing) or int(ids[:1] == tuple(after[-1:])) :]
        closes = self._closing or self._is_closed(ids[:1])
        return ids if closes else (*self.end_ids[:1], *ids)

    def _closing_ids(self) -> tuple[int, ...]:
        """Returns the tokens with which the template ends a turn, up to its end token, or none.

        They are the common beginning of what follows a dialogue's last turn and a turn in its
        middle: optional whitespace and a special token.
        """
        last = self.encode(self._render_suffix([], prompt=False))
        middle = self.encode(self._render_suffix([_build_message("user", "?")]))
        special = self.tokenizer.added_tokens_decoder
        for n, (token, other) in enumerate(zip(last, middle, strict=False)):
            if token == other and token in special:
                return last[: n + 1]
            if token != other or self.piece(token).strip():
                break
        return ()

    def _render_suffix(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        prompt: bool = True,
    ) -> str:
        """Renders what follows a turn, with the messages after it."""
        turn = _build_placeholder(repr(messages))
        around = [_build_message("user", "?"), _build_message("assistant", turn)]
        parts = self._render([*around, *messages], tools, prompt=prompt).split(turn)
        if len(parts) != 2:
            raise _refuse_template(
                "does not reproduce a turn verbatim, so rlx cannot tell what follows it"
            )
        return parts[1]


ModelDialogue = PlainDialogue | ChatDialogue
"""A model's dialogue format; see `rlx.rollout.Dialogue`."""


def _take_turns(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether messages are the user's and the assistant's in turn, the user's first and last."""
    roles = [message["role"] for message in messages]
    return len(roles) % 2 == 1 and roles == (["user", "assistant"] * len(roles))[: len(roles)]


def _build_message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _prepend_system_message(text: str, system: str) -> str:
    return f"{system}\n\n{text}" if system else text


def _build_placeholder(text: str) -> str:
    """Returns a word that no template changes and that `text` does not contain."""
    word = "rlxturn"
    while word in text:
        word += "n"
    return word


@dataclass(frozen=True, slots=True)
class DemonstrationTokens:
    """A demonstration's tokens, and which are the policy's, end-of-turn tokens included."""

    token_ids: tuple[int, ...]
    is_own: tuple[bool, ...]


_TurnTokens = tuple[tuple[int, ...], tuple[int, ...]]
"""The prompt or observation tokens before a turn, and those of the turn."""


@dataclass(frozen=True, slots=True)
class DemonstrationPlayer:
    """Plays an experiment's demonstrations; the result depends only on the demonstration's index.

    The environment is None if the schedule has none.
    """

    spec: ExperimentSpec
    task: Task
    environment: Environment | None = None

    def episode(self, dialogue: ModelDialogue, index: int) -> DemonstrationTokens:
        """Returns demonstration number `index` of the warm start.

        Raises:
            SpecError: the vocabulary has no token for part of its text.
        """
        ids: list[int] = []
        own: list[bool] = []
        for opening, turn in self._iterate_turns(dialogue, index):
            ids += [*opening, *turn]
            own += [*[False] * len(opening), *[True] * len(turn)]
        return DemonstrationTokens(tuple(ids), tuple(own))

    def list_parts(self, dialogue: ModelDialogue, index: int) -> list[tuple[int, ...]]:
        """Returns the tokens of what is encoded as one text: each prompt and each turn."""
        return [part for parts in self._iterate_turns(dialogue, index) for part in parts]

    def _iterate_turns(self, dialogue: ModelDialogue, index: int) -> Iterator[_TurnTokens]:
        seed = derive_seed(self.spec.seed, "demonstration", index)
        start = derive_seed(self.spec.seed, "warm start")
        rollout = self.spec.rollout
        if isinstance(rollout, EnvironmentRolloutSpec) and (
            isinstance(self.task, Rehearsed) or not rollout.has_one_turn
        ):
            if self.environment is None or not isinstance(self.task, Rehearsed):
                raise ValueError(
                    "a warm start with an environment needs the environment and a task with lessons"
                )
            problem, talk = self.task.lesson(index, start), build_talk(rollout)
            return _iterate_environment_turns(
                *(talk, problem, seed, dialogue, self.task, self.environment),
                player=index % talk.players,
            )
        problem = self.task.problem("train", index, start)
        return self._iterate_demonstration_turns(dialogue, problem, seed)

    def _iterate_demonstration_turns(
        self, dialogue: ModelDialogue, problem: Problem, seed: int
    ) -> Iterator[_TurnTokens]:
        turn: tuple[int, ...] = ()
        rollout = self.spec.rollout
        texts = rollout.arrange_demonstration(self.task.demonstration(problem, seed).turns)
        examples = list_example_messages(rollout)
        for turn_spec, text in zip(rollout.turn_specs.values(), texts, strict=False):
            if turn:
                prompt = fill_turn_template(dialogue, turn_spec.template, problem)
                opening = encode_between_turns(dialogue, prompt, turn, turn_spec.prefix)
            else:
                opening = encode_opening(
                    *(dialogue, turn_spec.template, problem),
                    *(rollout.system, examples, turn_spec.prefix),
                ).token_ids
            stopped = text.endswith(turn_spec.stop) if turn_spec.stop else False
            rest = remove_prefix(text, turn_spec.prefix)
            turn = (*dialogue.encode(rest), *(() if stopped else dialogue.end_ids[:1]))
            yield opening, turn


def _iterate_environment_turns(
    plan: EnvironmentPlan,
    problem: Problem,
    seed: int,
    dialogue: ModelDialogue,
    task: Rehearsed,
    environment: Environment,
    player: int,
) -> Iterator[_TurnTokens]:
    """Plays the scripted policy against the environment, as `rlx.rollout` does.

    In self-play the script plays both players, and the turns of one are yielded.
    """
    host = LocalHost(environment)
    try:
        (state,) = host.reset([(problem.fields, derive_seed(seed, "environment"))])
    except Exception as error:
        raise PluginError(
            f"rollout.environment: it cannot begin with the task's problem {problem.id!r}: "
            f"{type(error).__name__}: {error}; it may be made for the problems of another task"
        ) from error
    sides = tuple(_ScriptedPlayer() for _ in range(plan.players))
    sides[0].opening = plan.opening(problem, dialogue).token_ids
    mover = 0
    try:
        while (side := sides[mover]).number <= plan.last:
            drawn = derive_seed(seed, "player", mover) if mover else seed
            text = task.act(problem, side.turns, side.observations, drawn)
            # Like a sampled turn, one with a stop string has no end token, and is read from tokens.
            stopped = any(stop in text for stop in plan.turn.stop)
            own = dialogue.encode(remove_prefix(text, plan.turn.prefix))
            turn = (*own, *(() if stopped else dialogue.end_ids[:1]))
            if mover == player:
                yield side.opening, turn
            said, ends = read_turn(dialogue, turn, plan.turn.prefix)
            found = find_spans(said, ends, plan.turn.spans, first_turn=side.number == 1)
            spans = {name: span.text for name, span in found.items()}
            whose = mover if plan.players > 1 else None
            calls = plan.read_calls(dialogue, said, side.opening)
            action = plan.build_action(said, spans, side.number, player=whose, calls=calls)
            (step,) = host.step([(state, action)])
            side.turns.append(text)
            side.last_turn = turn
            if not isinstance(step, Step) or step.done:
                return
            state, mover = step.state, step.player if plan.players > 1 else mover
            sides[mover].read_answer(step, calls, plan, problem, dialogue)
    finally:
        host.release([state])


@dataclass(slots=True)
class _ScriptedPlayer:
    """What a player has read and written in a demonstration: `opening` is what it read before its
    next turn, `observations` what it read between its turns."""

    opening: tuple[int, ...] = ()
    turns: list[str] = field(default_factory=list)
    last_turn: tuple[int, ...] = ()
    observations: list[str] = field(default_factory=list)

    @property
    def number(self) -> int:
        """Number of its next turn."""
        return len(self.turns) + 1

    def read_answer(
        self,
        step: Step,
        calls: Sequence[ToolCall],
        plan: EnvironmentPlan,
        problem: Problem,
        dialogue: ModelDialogue,
    ) -> None:
        """Reads an observation, which is the prompt of a second player before its first turn."""
        if not self.turns:
            seen = replace(problem, prompt=step.observation, allow_control_tokens=False)
            self.opening = plan.opening(seen, dialogue).token_ids
            return
        answer = plan.encode_answer(step, calls, self.last_turn, self.number, dialogue)
        self.observations.append(answer.text)
        self.opening = answer.token_ids
