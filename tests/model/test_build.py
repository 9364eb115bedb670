"""Tiny models come from their seed alone; pretrained ones from their files."""

import random

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from transformers import AutoTokenizer

from rlx.errors import EnvironmentFault, SpecError
from rlx.model import build_policy
from rlx.spec import Pretrained, Tiny

SMALL = Tiny(hidden_size=32, heads=1, kv_heads=1, layers=1, intermediate_size=32)


def weights(policy):
    return dict(policy.model.named_parameters())


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def test_the_seed_decides_the_weights():
    first, again, other = (weights(build_policy(SMALL, seed)) for seed in (3, 3, 4))
    assert same(first, again)
    changed = [name for name in first if not torch.equal(first[name], other[name])]
    # Norms start at one and biases at zero whatever the seed.
    assert changed == [n for n in first if not n.endswith(("norm.weight", ".bias"))]


def test_building_leaves_the_global_generators_alone():
    def states():
        return torch.get_rng_state().tolist(), repr(np.random.get_state()), random.getstate()

    torch.manual_seed(5)
    before = states()
    build_policy(SMALL, 0)
    assert states() == before


def test_the_global_generator_does_not_reach_the_weights():
    torch.manual_seed(1)
    one = weights(build_policy(SMALL, 0))
    torch.manual_seed(2)
    assert same(one, weights(build_policy(SMALL, 0)))


@pytest.mark.parametrize(
    ("shape", "complaint"),
    [({"head_dim": 24}, "greater than or equal to 32"), ({"heads": 4, "kv_heads": 3}, "divide")],
)
def test_heads_that_no_engine_takes_are_refused(shape, complaint):
    with pytest.raises(ValidationError, match=complaint):
        Tiny(**shape)


def test_the_model_is_built_as_asked():
    spec = Tiny(hidden_size=128, heads=4, kv_heads=2, layers=2, intermediate_size=48)
    config = build_policy(spec, 0).model.config
    assert (config.head_dim, config.num_attention_heads) == (32, 4)
    assert (config.num_key_value_heads, config.num_hidden_layers) == (2, 2)
    assert config.tie_word_embeddings


def test_an_unknown_tokenizer_is_refused_by_name():
    with pytest.raises(SpecError, match=r"ships no 'klingon'; there is arithmetic"):
        build_policy(Tiny(tokenizer="klingon"), 0)


def test_anyone_can_load_what_is_saved(tmp_path):
    saved = build_policy(SMALL, 3)
    saved.save(tmp_path)
    text = "nums: 3 12\ntarget: 36\n<think>3*12=36\n</think><confidence>0.7</confidence>"
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert tuple(theirs.encode(text, add_special_tokens=False)) == saved.dialogue.encode(text)


def test_a_saved_policy_is_a_pretrained_model(tmp_path):
    saved = build_policy(SMALL, 3)
    saved.save(tmp_path)
    loaded = build_policy(Pretrained(path=str(tmp_path)), seed=99)
    assert same(weights(saved), weights(loaded))
    assert loaded.end_ids == saved.end_ids
    assert loaded.dialogue.open("nums: 3\n") == saved.dialogue.open("nums: 3\n")


def test_missing_files_are_the_machines_fault(tmp_path):
    with pytest.raises(EnvironmentFault, match="could not be fetched"):
        build_policy(Pretrained(path=str(tmp_path / "nothing")), 0)
