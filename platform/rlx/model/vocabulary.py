"""Tokenizers of tiny models: shipped with rlx, of a folder, of bytes, or trained on texts; without
importing transformers."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Self

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from rlx.errors import EnvironmentFault
from rlx.text import escape_unprintable

SPECIAL_TOKENS = {
    "pad_token": "<pad>",
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "unk_token": "<unk>",
}
"""Roles and names of the control tokens of rlx's own vocabularies, in the order of their ids."""
MOST_TOKENS = 1024
"""Size limit of a trained vocabulary: more would make the embedding most of a tiny model."""
PIECES = r"</?[A-Za-z_][\w-]*>| (?=</?[A-Za-z_])| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]|\s"
"""What may become one token: a tag, a word with the space before it, a digit, a sign, a space.
Numbers are split into digits, so that each has one spelling."""

_DEFINITION, _CONFIG = "tokenizer.json", "tokenizer_config.json"


class Vocabulary:
    """A tokenizer, with the methods of a transformers tokenizer that `PlainDialogue` uses.

    `special` holds the names of the control tokens by their role, such as `eos_token`.
    """

    chat_template = None

    def __init__(self, tokenizer: Tokenizer, special: Mapping[str, str]) -> None:
        self.tokenizer = tokenizer
        self.special = dict(special)

    # Kinds ---------------------------------------------------------------------------------------

    @classmethod
    def load_shipped(cls, name: str) -> Self:
        definition = files("rlx.model").joinpath("tokenizers", f"{name}.json")
        return cls(Tokenizer.from_str(definition.read_text(encoding="utf-8")), SPECIAL_TOKENS)

    @classmethod
    def build_bytes(cls) -> Self:
        """Builds the vocabulary of single bytes, which writes any text."""
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        ids = {name: i for i, name in enumerate((*SPECIAL_TOKENS.values(), *alphabet))}
        tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return cls(_add_control_tokens(tokenizer), SPECIAL_TOKENS)

    @classmethod
    def train(cls, texts: Iterable[str]) -> Self:
        """Trains a byte-level BPE (Sennrich et al. 2016) on texts; it writes any text."""
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(PIECES), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        trainer = trainers.BpeTrainer(
            vocab_size=MOST_TOKENS,
            min_frequency=2,
            special_tokens=list(SPECIAL_TOKENS.values()),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls(_add_control_tokens(tokenizer), SPECIAL_TOKENS)

    @classmethod
    def load_folder(cls, folder: Path) -> Self:
        """Loads the tokenizer saved in a folder, in the layout of Hugging Face.

        Raises:
            EnvironmentFault: its files are missing, damaged, or name no end token.
        """
        where = escape_unprintable(str(folder))
        try:
            tokenizer = Tokenizer.from_file(str(folder / _DEFINITION))
            config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
            named = {role: config.get(role) for role in SPECIAL_TOKENS}
            named |= {r: n["content"] for r, n in named.items() if isinstance(n, dict)}
        except Exception as error:
            raise EnvironmentFault(
                f"model.tokenizer: the tokenizer in {where} cannot be read ({error}); give a "
                f"folder with {_DEFINITION} and {_CONFIG}, as `save_pretrained` writes it"
            ) from error
        special = {
            role: name
            for role, name in named.items()
            if isinstance(name, str) and tokenizer.token_to_id(name) is not None
        }
        if "eos_token" not in special:
            raise EnvironmentFault(
                f"model.tokenizer: {where} names no `eos_token`, with which a model ends its turns"
            )
        return cls(tokenizer, special)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self.special}
        (folder / _DEFINITION).write_text(self.definition, encoding="utf-8")
        (folder / _CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")

    @property
    def definition(self) -> str:
        return str(self.tokenizer.to_str())

    @property
    def digest(self) -> str:
        """16 hex digits that identify the tokenizer."""
        inputs = json.dumps([self.definition, self.special])
        return hashlib.sha256(inputs.encode()).hexdigest()[:16]

    # What a dialogue uses ------------------------------------------------------------------------

    def __len__(self) -> int:
        return int(self.tokenizer.get_vocab_size())

    def __call__(self, text: str, **_: bool) -> Mapping[str, Sequence[Any]]:
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        return {"input_ids": encoding.ids, "offset_mapping": encoding.offsets}

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """The tokens of a text; with special tokens, after the one that begins a dialogue."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        begin = self.bos_token_id if add_special_tokens else None
        return ids if begin is None else [begin, *ids]

    def decode(self, ids: Sequence[int], **_: bool) -> str:
        """The text of tokens; control tokens give their names."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        added: Mapping[int, AddedToken] = self.tokenizer.get_added_tokens_decoder()
        return added

    @property
    def bos_token_id(self) -> int | None:
        return self._find_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._find_id("eos_token")

    @property
    def unk_token_id(self) -> int | None:
        return self._find_id("unk_token")

    def _find_id(self, role: str) -> int | None:
        found: int | None = self.tokenizer.token_to_id(self.special.get(role, ""))
        return found


def _add_control_tokens(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(name, normalized=False, special=True) for name in SPECIAL_TOKENS.values()]
    )
    return tokenizer
