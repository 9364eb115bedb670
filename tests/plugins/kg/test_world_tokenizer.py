"""The tokenizer named `world` is the one that the shipped graph and its texts ask for."""

import json
from pathlib import Path

from world_tokenizer import build_tokenizer_definition, main

import rlx.plugin
from rlx_plugins.kg.load import load_world_graph

SHIPPED = Path(rlx.plugin.__file__).parents[1] / "model" / "tokenizers" / "world.json"


def test_the_shipped_file_is_what_its_command_writes(tmp_path):
    main(tmp_path / "made.json")
    assert (tmp_path / "made.json").read_text() == SHIPPED.read_text()


def test_every_entity_is_one_token():
    vocab = json.loads(SHIPPED.read_text())["model"]["vocab"]
    assert all(
        f" {load_world_graph().label(entity)}" in vocab for entity in load_world_graph().entities
    )
    assert len(set(vocab.values())) == len(vocab)


def test_the_longest_token_that_fits_comes_first():
    tokens = build_tokenizer_definition([" New", " New York", "x"])
    pattern = tokens["pre_tokenizer"]["pattern"]["Regex"]
    assert pattern.index("New\\ York") < pattern.index("New(?!")
