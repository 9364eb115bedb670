"""What stands in for a tokenizer or for problems that are not on this machine."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from rlx.discovery import ExperimentPlugins
from rlx.errors import PluginError, SpecError
from rlx.plugin import Problem, StandsIn, Task
from rlx.rollout import Dialogue, TurnPrompt
from rlx.seeding import derive_seed
from rlx.spec import ExperimentSpec, TinyModelSpec

TAGS = re.compile(r"(</?[A-Za-z_][\w-]*>)")


class EncodingDialogue(Dialogue, Protocol):
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

_PIECE = re.compile(r"<\|\w+\|>| ?[^\W\d_]{1,8}|\d| ?[^\w\s]|\s|_")
"""Short words with the space before them, single digits, single signs: roughly how large byte-level
vocabularies split a text."""
_CONTROL = re.compile(r"<(?=\|\w+\|>)")


class StandInDialogue:
    """A dialogue whose vocabulary is the pieces of the texts that it has encoded.

    It keeps the contract of `rlx.model.dialogue`: the same text always gives the same tokens, and
    turns open and close with control tokens.

    Args:
        chat: turns have headers, as in chat templates; otherwise they follow as plain text.
    """

    def __init__(self, *, chat: bool) -> None:
        self._chat = chat
        self._ids: dict[str, int] = {}
        self._pieces: list[str] = []
        self.end_ids = self.encode("<|im_end|>" if chat else "<|endoftext|>")

    def open(self, text: str, system: str = "") -> tuple[int, ...]:
        """System message and text, then the header of the first turn."""
        if not self._chat:
            return self.encode(f"{system}\n\n{text}" if system else text)
        before = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
        return self.encode(before + self._write_user_message(text))

    def reply(self, text: str, after: Sequence[int]) -> tuple[int, ...]:
        """The text and the next turn's header, after closing the previous turn if it is open."""
        closing = () if after and after[-1] in self.end_ids else self.end_ids
        message = f"\n{self._write_user_message(text)}" if self._chat else text
        return (*closing, *self.encode(message))

    def _write_user_message(self, text: str) -> str:
        return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"

    def encode_observation(self, text: str, after: Sequence[int], *, inline: bool) -> TurnPrompt:
        """Encodes the text with control token names broken up, as a reply or inline."""
        text = self.break_control_tokens(text)
        return TurnPrompt(text, self.encode(text) if inline else self.reply(text, after))

    def break_control_tokens(self, text: str) -> str:
        """Inserts a space into names of control tokens."""
        return _CONTROL.sub("< ", text)

    def read(self, token_ids: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """Text without the end token, and the text's length after every token."""
        pieces = [self.piece(token) for token in token_ids]
        if token_ids and token_ids[-1] in self.end_ids:
            pieces[-1] = ""
        return "".join(pieces), tuple(accumulate(map(len, pieces)))

    def encode(self, text: str) -> tuple[int, ...]:
        """Encodes a text; new pieces become part of the vocabulary."""
        ids = tuple(self._ids.setdefault(one, len(self._ids)) for one in _PIECE.findall(text))
        self._pieces = list(self._ids)
        return ids

    def piece(self, token: int) -> str:
        """The text of a token."""
        return self._pieces[token]


@dataclass(frozen=True, slots=True)
class PlanSpeech:
    """The dialogue of the experiment's model.

    Attributes:
        dialogue: converts text to tokens and back.
        vocabulary: number of tokens of a tiny model; None for a pretrained one.
        note: what stands in for the tokenizer; "" if it is the model's own.
    """

    dialogue: EncodingDialogue
    vocabulary: int | None
    note: str


def load_speech(spec: ExperimentSpec, plugins: ExperimentPlugins) -> PlanSpeech:
    """Loads the dialogue of the experiment's model, or a stand-in for it.

    Raises:
        SpecError, EnvironmentFault: the tokenizer is here but cannot be used.
    """
    from rlx.model import (
        Vocabulary,
        build_vocabulary_dialogue,
        choose_vocabulary,
        load_local_dialogue,
        load_vocabulary,
    )

    model, note = spec.model, ""
    if not isinstance(model, TinyModelSpec):
        if (dialogue := load_local_dialogue(model)) is not None:
            return PlanSpeech(dialogue, None, "")
        note = (
            f"model.path: the tokenizer of {model.path!r} is not on this machine; words, digits "
            "and signs stand in for its tokens, so token counts are estimates"
        )
        return PlanSpeech(StandInDialogue(chat=model.chat_template), None, note)
    try:
        vocabulary = choose_vocabulary(spec, plugins)
    except (OSError, ImportError, ValueError) as error:  # the plan of the problems reports it
        if model.tokenizer is None:
            vocabulary = load_vocabulary(model)
        else:
            vocabulary = Vocabulary.build_bytes()
            note = (
                "model.tokenizer: it is trained on texts that are missing "
                f"({_first_line(error)}); bytes stand in, so token counts are estimates"
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
        return PlanProblems(tuple(task.problem("train", i, seed) for i in range(count)))
    except (OSError, ImportError) as error:
        note = f"task: its data are not on this machine ({_first_line(error)})"
        if isinstance(task, StandsIn) and task.stand_ins:
            problems = tuple(task.stand_in(i, seed) for i in range(count))
            return PlanProblems(problems, f"{note}; {task.stand_ins} stand in")
        problems = tuple(_make_up_problem(task, number) for number in range(count))
        return PlanProblems(problems, f"{note}; problems that rlx made up stand in")
    except ValueError as error:
        raise SpecError(f"task: {_first_line(error)}") from error
    except Exception as error:
        why = f"{type(error).__name__}: {_first_line(error)}"
        raise PluginError(f"task plugin {spec.task.plugin!r} failed on problem 0: {why}") from error


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
    return Problem(
        id=f"stand-in/{number}",
        prompt=prompt,
        fields=fields,
        allow_control_tokens=getattr(task, "allow_control_tokens", False) is True,
    )


def _first_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"cannot read {error.filename}: {error.strerror}"
    return (str(error).strip() or type(error).__name__).splitlines()[0].removesuffix(".")
