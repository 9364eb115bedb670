"""Builds the word-level tokenizer of the shipped graph, `world`, which tiny models use.

`python docs/make/world_tokenizer.py FILE` writes it in the format of Hugging Face tokenizers.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from rlx_plugins.kg.load import load_world_graph
from rlx_plugins.kg.vocabulary import build_kg_vocabulary

__all__ = ["build_tokenizer_definition"]

_SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")


def build_tokenizer_definition(tokens: list[str]) -> dict[str, Any]:
    """The definition of a tokenizer with exactly these tokens and longest-match tokenization.

    A word without a token becomes one unknown token, including its leading space, as does any other
    character.
    """
    ordered = sorted(tokens, key=lambda token: (-len(token), token))
    # A token that ends in a letter must end a word; else " Niger" would match in " Nigeria".
    exact = "|".join(
        re.escape(token) + (r"(?![\w-])" if token[-1].isalnum() else "") for token in ordered
    )
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for number, token in enumerate(_SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": rf"{exact}| ?[\w-]+|\s|."},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "WordLevel",
            "vocab": {token: number for number, token in enumerate((*_SPECIAL, *tokens))},
            "unk_token": "<unk>",
        },
    }


def main(path: Path) -> None:
    """Writes the tokenizer of the shipped graph."""
    text = json.dumps(
        build_tokenizer_definition(build_kg_vocabulary(load_world_graph())),
        indent=1,
        ensure_ascii=False,
    )
    path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
