"""Reads the requests of one agent's program as turns of its rollout. Nothing here knows HTTP."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlx.rollout import (
    Completion,
    RecordedTurn,
    RolloutRecorder,
    TurnPrompt,
    TurnRequest,
    copy_info,
)
from rlx.serving import (
    ChatAnswer,
    ChatMessage,
    ChatRequest,
    InvalidRequestError,
    SampledCompletion,
    ServedModel,
    TextAnswer,
    TextRequest,
    TokenizedPrompt,
    refuse_for,
)

MOST_INFO = 1_000_000
"""Maximum characters of all that a program reports, as JSON."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """The turn whose dialogue a request continues, None if it opens one, and what it adds."""

    after: RecordedTurn | None
    prompt: TurnPrompt


@dataclass(slots=True, eq=False)
class AgentRequests:
    """The program of one rollout, and its requests.

    A request continues the longest dialogue that its messages, text or tokens begin with: it goes
    on from the tokens that were sampled, and only what follows them is tokenized.

    Attributes:
        tree: number of its problem among those of a step.
        is_over: whether the rollout has no further turns, so that it does not matter how the
            program ends.
        refused: number of requests that could not be answered.
        key: of its address.
        seconds: those in which it did not wait for the model.
    """

    model: ServedModel
    recorder: RolloutRecorder
    tree: int = 0
    is_over: bool = False
    refused: int = 0
    key: str = ""
    seconds: float = 0.0
    is_killed: bool = False
    _dialogues: dict[str, RecordedTurn] = field(default_factory=dict)
    _texts: list[tuple[str, RecordedTurn]] = field(default_factory=list)
    _responses: dict[str, list[RecordedTurn]] = field(default_factory=dict)
    _reported: int = 0

    def read_chat(self, request: ChatRequest) -> Continuation:
        tools, messages = request.offered_tools, request.messages
        for count in range(len(messages) - 1, 0, -1):
            if messages[count - 1].role != "assistant":
                continue
            after = self._dialogues.get(_identify_dialogue(tools, messages[:count]))
            if after is not None:
                added = messages[count:]
                ids = self.model.encode_following(added, after.segment.token_ids, tools)
                return Continuation(after, TurnPrompt(self._join_texts(added), ids))
        return Continuation(
            None, TurnPrompt(self._join_texts(messages), self.model.encode_messages(request))
        )

    def read_text(self, request: TextRequest) -> Continuation:
        if len(request.prompts) != 1:
            raise InvalidRequestError("an agent's request has one prompt", "prompt")
        if request.echo or request.max_tokens == 0:
            raise InvalidRequestError("an agent's request repeats no prompt", "echo")
        (prompt,) = request.prompts
        if isinstance(prompt, str):
            texts = self._texts
            known = [(len(text), turn) for text, turn in texts if prompt.startswith(text)]
        else:
            known = [
                (len(turn.whole), turn)
                for turn in self.recorder.turns
                if tuple(prompt[: len(turn.whole)]) == turn.whole
            ]
        before, after = max(known, key=lambda pair: pair[0], default=(0, None))
        if after is None:
            whole = self.model.encode_prompt(prompt)
            return Continuation(None, TurnPrompt(whole.text, whole.token_ids))
        dialogue, rest = self.model.policy.dialogue, prompt[before:]
        if isinstance(rest, str):
            with refuse_for("prompt"):
                return Continuation(after, TurnPrompt(rest, dialogue.encode(rest)))
        ids = self.model.require_tokens(rest)
        return Continuation(after, TurnPrompt(dialogue.decode_tokens(ids), ids))

    def ask(self, request: ChatRequest | TextRequest, continued: Continuation) -> TurnRequest:
        stop = self.recorder.plan.turn.stop
        if missing := [each for each in request.stop if each not in stop]:
            message = f"this run samples with other stop strings: add {missing[0]!r} to "
            raise InvalidRequestError(f"{message}rollout.turn.stop", "stop")
        if request.likeliest is not None:
            raise InvalidRequestError("an agent's request has no log-probabilities", "logprobs")
        limits = [request.max_tokens, getattr(request, "max_completion_tokens", None)]
        return self.recorder.ask(
            continued.after,
            continued.prompt,
            count=request.choices,
            max_new_tokens=min((each for each in limits if each is not None), default=None),
        )

    def answer_chat(self, request: ChatRequest, turns: Sequence[RecordedTurn]) -> ChatAnswer:
        """Returns the answer with the turns, which later requests may continue."""
        answer = ChatAnswer(self.model, self._replace_stop(request), [_list_samples(turns)])
        self._responses[answer.id] = list(turns)
        replies = answer.list_replies()
        for turn, (_, message) in zip(turns, replies, strict=True):
            said = ChatMessage.model_validate(message)
            dialogue = _identify_dialogue(request.offered_tools, [*request.messages, said])
            self._dialogues.setdefault(dialogue, turn)
        return answer

    def answer_text(self, request: TextRequest, turns: Sequence[RecordedTurn]) -> TextAnswer:
        group = _list_samples(turns)
        (prompt,) = request.prompts
        whole = TokenizedPrompt("", group[0].context, ())
        answer = TextAnswer(self.model, self._replace_stop(request), [group], [whole])
        self._responses[answer.id] = list(turns)
        for turn, sampled in zip(turns, group, strict=True):
            reply = self.model.read_completion(sampled, self.recorder.plan.turn.stop)
            if isinstance(prompt, str):
                self._texts.append((prompt + reply.text, turn))
        return answer

    def report(self, body: Any) -> None:
        """Adds what a program reports: `{"turn": ..., NAME: VALUE, ...}`. `turn` is a turn's
        number, the id of a response, or `[id, index of the choice]`; without it the values are of
        the whole rollout.
        """
        try:
            info = copy_info(body, "info")
        except ValueError as error:
            raise InvalidRequestError(f"the program {error}", None) from error
        turn = info.pop("turn", None)
        self._reported += len(json.dumps(info))
        if self._reported > MOST_INFO:
            raise InvalidRequestError(f"a rollout's info has at most {MOST_INFO} characters", None)
        self.recorder.report(None if turn is None else self._find_turns(turn), info)

    def _find_turns(self, name: Any) -> list[RecordedTurn]:
        found: list[RecordedTurn] = []
        if isinstance(name, int) and not isinstance(name, bool):
            found = [turn for turn in self.recorder.turns if turn.segment.turn == name]
            if len(found) > 1:
                message = f"{len(found)} turns have the number {name}: name the response's id"
                raise InvalidRequestError(message, "turn")
        elif isinstance(name, str):
            found = self._responses.get(name, [])
        elif isinstance(name, list) and len(name) == 2 and isinstance(name[0], str):
            turns = self._responses.get(name[0], [])
            is_there = type(name[1]) is int and 0 <= name[1] < len(turns)
            found = [turns[name[1]]] if is_there else []
        if not found:
            raise InvalidRequestError(f"there is no turn {name!r}", "turn")
        return found

    def list_ignored(self, request: ChatRequest | TextRequest) -> list[str]:
        turn = self.recorder.plan.turn
        asked = {
            "temperature": (request.temperature, turn.temperature),
            "top_p": (request.top_p, turn.top_p),
            "top_k": (request.top_k, turn.top_k),
        }
        return [
            f"{name} {wanted:g}: rollout.turn.{name} is {own:g}"
            for name, (wanted, own) in asked.items()
            if wanted is not None and wanted != own
        ]

    def _join_texts(self, messages: Sequence[ChatMessage]) -> str:
        shown = [m["content"] for m in self.model.write_messages(messages) if m["role"] != "system"]
        return "\n\n".join(shown)

    def _replace_stop(self, request: Any) -> Any:
        return request.model_copy(update={"stop": self.recorder.plan.turn.stop})


def _list_samples(turns: Sequence[RecordedTurn]) -> tuple[SampledCompletion, ...]:
    samples = []
    for turn in turns:
        own = turn.segment
        if own.finish_reason == "":
            raise ValueError("a sampled turn has a reason for its end")
        completion = Completion(own.token_ids, own.logprobs, own.finish_reason)
        context = turn.whole[: len(turn.whole) - len(own.token_ids)]
        samples.append(SampledCompletion(context, completion, None))
    return tuple(samples)


def _identify_dialogue(tools: Sequence[Mapping[str, Any]], messages: Sequence[ChatMessage]) -> str:
    """Equal for dialogues that are the same but for reasoning and space around an assistant's
    message."""
    said = []
    for message in messages:
        written = message.to_template()
        if message.role == "assistant":
            written.pop("reasoning_content", None)
            written["content"] = written["content"].strip()
        said.append(written)
    return json.dumps([list(tools), said], sort_keys=True)
