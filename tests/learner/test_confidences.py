"""The values of a confidence as tokens, and as branches of the rows that state one."""

from types import SimpleNamespace

import checkpoints
import pytest
import torch
from rows import each_row

from rlx.errors import SpecError
from rlx.learner.distributed import Ranks
from rlx.learner.learner import encode_confidences
from rlx.learner.pack import Branches, RankMicroBatches, pack_rows
from rlx.model.tokenizer import load_local_dialogue
from rlx.plugin import get_confidence_values
from rlx.spec import TinyModelSpec

GRID = get_confidence_values(None)


def tiny(tokenizer):
    return load_local_dialogue(TinyModelSpec(tokenizer=tokenizer))


@pytest.fixture(scope="module")
def by_digit():
    """A byte-level BPE that splits digits one by one, as those of instruct models do."""
    heard = ["<confidence>0.8</confidence>"] * 50
    return checkpoints.train_bytewise(heard, 300, apart=r"\d|[^\d]+")


def test_a_value_is_one_token_of_a_vocabulary_that_has_it():
    dialogue = tiny("arithmetic_05")
    tokens = encode_confidences(GRID, "confidence", dialogue)
    assert [len(value) for value in tokens] == [1] * 21
    assert [dialogue.read(value)[0] for value in tokens] == list(GRID)


def test_a_value_that_begins_another_is_told_apart_by_what_closes_it(by_digit):
    tokens = encode_confidences(GRID, "confidence", by_digit)
    texts = [by_digit.read(value)[0] for value in tokens]
    closing = texts[0].removeprefix("0.0")
    assert closing
    assert "</confidence>".startswith(closing)
    assert texts == [value + closing for value in GRID]
    for one in tokens:
        assert sum(other[: len(one)] == one for other in tokens) == 1


def test_a_vocabulary_without_the_values_is_refused():
    with pytest.raises(SpecError, match=r"no token for '0\.05'"):
        encode_confidences(GRID, "confidence", tiny("arithmetic"))


def test_values_that_are_the_same_are_refused():
    with pytest.raises(SpecError, match="does not tell the values of <confidence> apart"):
        encode_confidences(("0.5", "0.5"), "confidence", tiny("arithmetic"))


def test_a_tag_that_a_token_joins_with_a_value_is_refused():
    dialogue = checkpoints.train_bytewise([">0."] * 50)
    with pytest.raises(SpecError, match=r"joins '0\.5' with a tag"):
        encode_confidences(("0.5",), "confidence", dialogue)


IDS = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 6, 7, 0], [1, 2, 3, 8, 9]])
IS_TOKEN = IDS > 0
HERE = Ranks(0, 1, torch.device("cpu"))
NOTHING = torch.zeros_like(IS_TOKEN)


def path(tree, node):
    return tree.token_ids[[j for j in range(node + 1) if node < tree.ends[j]]].tolist()


@each_row("limit", [1000, 6, 1])
@each_row("merge", [True, False])
def test_every_token_of_a_branch_follows_its_row_and_its_own_tokens(limit, merge):
    values = ((11,), (12, 13), (12, 14, 15), (4, 5))
    branches = Branches(
        rows=torch.tensor([0, 0, 0, 0, 2, 2, 2, 2]), starts=torch.tensor([3] * 8), tokens=values * 2
    )
    rows, want = SimpleNamespace(token_ids=IDS, is_token=IS_TOKEN), IS_TOKEN.clone()
    want[:, 0] = False
    found = {}
    for packed in RankMicroBatches(rows, want, limit, HERE, merge=merge, branches=branches):
        for state, token, number in zip(
            packed.branches.states, packed.branches.tokens, packed.branches.numbers, strict=True
        ):
            at = int(packed.branches.at[state])
            read = path(packed, at)
            found.setdefault(int(number), []).append((read, int(token)))
            assert int(packed.positions[at]) == len(read) - 1
            assert int(packed.branches.rows[state]) == branches.rows[number]
            assert int(packed.branches.starts[state]) == 3
        assert packed.sources[len(packed.targets) :].tolist() == packed.branches.at.tolist()
    expected = {}
    for number, (row, start) in enumerate(zip(branches.rows, branches.starts, strict=True)):
        begun = IDS[row, :start].tolist()
        tokens = branches.tokens[number]
        expected[number] = [([*begun, *tokens[:n]], token) for n, token in enumerate(tokens)]
    assert found == expected


@each_row("merge", [True, False])
def test_values_of_one_token_add_no_node(merge):
    branches = Branches(
        rows=torch.tensor([0] * 3), starts=torch.tensor([3] * 3), tokens=((11,), (12,), (13,))
    )
    want = IS_TOKEN.clone()
    want[:, 0] = False
    plain = pack_rows(IDS, IS_TOKEN, want, merge=merge)
    more = pack_rows(IDS, IS_TOKEN, want, branches=branches, merge=merge)
    assert len(more) == len(plain)
    assert len(more.branches.at) == 1


def test_a_row_without_another_wanted_token_is_read_only_up_to_its_branches():
    branches = Branches(rows=torch.tensor([1]), starts=torch.tensor([2]), tokens=((11, 12),))
    packed = pack_rows(IDS, IS_TOKEN, NOTHING, branches=branches)
    assert packed.token_ids.tolist() == [1, 2, 11]
    assert len(packed.rows) == 0
