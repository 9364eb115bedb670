"""Placeholders for a tokenizer or task data that are not on this machine."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

from rlx.discovery import ExperimentPlugins
from rlx.errors import PluginError, SpecError
from rlx.plugin import Problem, StandsIn, Task
from rlx.rollout import Dialogue, TurnPrompt
from rlx.seeding import derive_seed
from rlx.spec import ExperimentSpec, TinyModelSpec

if TYPE_CHECKING:
    from rlx.model import Vocabulary


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
PIECE = re.compile(r"<\|\w+\|>| ?[^\W\d_]{1,8}|\d| ?[^\w\s]|\s|_")
"""Short words with the space before them, single digits, single signs: roughly how large byte-level
vocabularies split a text.
"""
CONTROL = re.compile(r"<(?=\|\w+\|>)")
TAGS = re.compile(r"(</?[A-Za-z_][\w-]*>)")
POINTS = re.compile(r"(?<=[0-9])(?=\.)|(?<=\.)(?=[0-9])")
DIGITS = re.compile(r"(?<=\d)(?=\d)")


class StandInDialogue:
    """A dialogue for a model whose tokenizer is not on this machine.

    It keeps the contract of `rlx.model.dialogue`: the same text always gives the same tokens, and
    turns open and close with control tokens. New text extends its vocabulary.

    Args:
        chat: turns have headers, as in chat templates; otherwise they follow as plain text.
    """

    def __init__(self, *, chat: bool) -> None:
        self._chat = chat
        self._pieces: list[str] = []
        self._ids: dict[str, int] = {}
        self._end = self.encode("<|im_end|>" if chat else "<|endoftext|>")
        self.end_ids = self._end

    def open(self, text: str, system: str = "") -> tuple[int, ...]:
        """System message and text, then the header of the first turn."""
        if not self._chat:
            return self.encode(f"{system}\n\n{text}" if system else text)
        before = _format_chat_message("system", system) if system else ""
        return self.encode(f"{before}{_format_chat_message('user', text)}<|im_start|>assistant\n")

    def reply(self, text: str, after: Sequence[int]) -> tuple[int, ...]:
        """The text and the next turn's header, after closing the previous turn if it is open."""
        closing = () if after and after[-1] in self.end_ids else self._end
        message = (
            f"\n{_format_chat_message('user', text)}<|im_start|>assistant\n" if self._chat else text
        )
        return (*closing, *self.encode(message))

    def encode_observation(self, text: str, after: Sequence[int], *, inline: bool) -> TurnPrompt:
        """Encodes the text with control token names broken up, as a reply or inline."""
        text = self.break_control_tokens(text)
        return TurnPrompt(text, self.encode(text) if inline else self.reply(text, after))

    def break_control_tokens(self, text: str) -> str:
        """Inserts a space into names of control tokens."""
        return CONTROL.sub("< ", text)

    def read(self, token_ids: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """Text without the end token, and the text's length after every token."""
        closed = bool(token_ids) and token_ids[-1] in self.end_ids
        pieces = [self.piece(token) for token in token_ids]
        if closed:
            pieces[-1] = ""
        return "".join(pieces), tuple(accumulate(map(len, pieces)))

    def encode(self, text: str) -> tuple[int, ...]:
        """Encodes a text; new pieces become part of the vocabulary."""
        return tuple(map(self._id, PIECE.findall(text)))

    def piece(self, token: int) -> str:
        """The text of a token."""
        return self._pieces[token]

    def _id(self, piece: str) -> int:
        if piece not in self._ids:
            self._ids[piece] = len(self._pieces)
            self._pieces.append(piece)
        return self._ids[piece]


def _format_chat_message(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


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
    from rlx.model import build_vocabulary_dialogue, load_local_dialogue

    if isinstance(spec.model, TinyModelSpec):
        vocabulary, note = _load_vocabulary(spec, spec.model, plugins)
        return PlanSpeech(build_vocabulary_dialogue(vocabulary), len(vocabulary), note)
    dialogue = load_local_dialogue(spec.model)
    if dialogue is not None:
        return PlanSpeech(dialogue, None, "")
    model = spec.model
    note = (
        f"model.path: the tokenizer of {model.path!r} is not on this machine; words, digits and "
        "signs stand in for its tokens, so token counts are estimates"
    )
    return PlanSpeech(StandInDialogue(chat=model.chat_template), None, note)


def _load_vocabulary(
    spec: ExperimentSpec, model: TinyModelSpec, plugins: ExperimentPlugins
) -> "tuple[Vocabulary, str]":
    """The tokenizer of a tiny model, or one that stands in where its texts are missing."""
    from rlx.model import Vocabulary, choose_vocabulary, load_vocabulary

    try:
        return choose_vocabulary(spec, plugins), ""
    except (OSError, ImportError, ValueError) as error:  # the plan of the problems reports it
        if model.tokenizer is None:
            return load_vocabulary(model), ""
        note = f"model.tokenizer: it is trained on texts that are missing ({_first_line(error)})"
        return Vocabulary.build_bytes(), f"{note}; bytes stand in, so token counts are estimates"


def fit_to_vocabulary(speech: EncodingDialogue, text: str) -> str:
    """Reduces `text` to what the vocabulary can encode: no unknown signs, digits one by one."""
    if _can_encode(speech, text):
        return text
    encodable = (
        p if _can_encode(speech, p) else _keep_known_characters(speech, p) for p in TAGS.split(text)
    )
    known = "".join(encodable)
    for apart in (DIGITS, POINTS):
        if not _can_encode(speech, known):
            known = apart.sub(" ", known)
    return known


def _keep_known_characters(speech: EncodingDialogue, text: str) -> str:
    return "".join(c for c in text if _can_encode(speech, c)).strip(" ")


def _can_encode(speech: EncodingDialogue, text: str) -> bool:
    try:
        speech.encode(text)
    except SpecError:
        return False
    return True


# Problems ----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class PlanProblems:
    """Problems to plan with.

    Attributes:
        problems: the task's problems, or placeholders.
        note: what replaces them and why; "" if they are the task's own.
    """

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
        return _stand_ins(task, count, seed, _first_line(error))
    except ValueError as error:
        raise SpecError(f"task: {_first_line(error)}") from error
    except Exception as error:
        why = f"{type(error).__name__}: {_first_line(error)}"
        raise PluginError(f"task plugin {spec.task.plugin!r} failed on problem 0: {why}") from error


def _stand_ins(task: Task, count: int, seed: int, why: str) -> PlanProblems:
    note = f"task: its data are not on this machine ({why})"
    if isinstance(task, StandsIn) and task.stand_ins:
        problems = tuple(task.stand_in(i, seed) for i in range(count))
        return PlanProblems(problems, f"{note}; {task.stand_ins} stand in")
    return PlanProblems(
        tuple(_build_generic_problem(task, number) for number in range(count)),
        f"{note}; problems that rlx made up stand in",
    )


def _build_generic_problem(task: Task, number: int) -> Problem:
    """A sum, with the field names that the task's options set."""
    question, answer = f"{number + 6} * 7 = ?", str((number + 6) * 7)
    named = getattr(task, "fields", None)
    names = list(named) if isinstance(named, Mapping) else ["question", "answer"]
    fields: dict[str, Any] = {n: answer if _is_truth(n) else question for n in names}
    template = getattr(task, "prompt", "{question}")
    try:
        prompt = str(template).format(**fields)
    except (LookupError, ValueError):
        prompt = question
    return Problem(
        id=f"stand-in/{number}",
        prompt=prompt,
        fields=fields,
        allow_control_tokens=getattr(task, "allow_control_tokens", False) is True,
    )


def _is_truth(name: str) -> bool:
    return any(word in name.lower() for word in ("answer", "truth", "solution", "target", "label"))


def _first_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"cannot read {error.filename}: {error.strerror}"
    return (str(error).strip() or type(error).__name__).splitlines()[0].removesuffix(".")
