"""`rlx samples --export`: stored rollouts as JSON Lines, in the shape of KG-R1."""

import json

import pytest
import torch
from submissions import submit
from trees import conversation, turn

from rlx.batch import build_token_batch
from rlx.cli import main
from rlx.plugin import Problem
from rlx.record.recorder import Recorder
from rlx.record.rollouts import TrainedRows
from rlx.reward import RewardEntry, RewardTable
from rlx.rollout import NO_PARENT, RolloutTree, Segment, build_piece_splitter

pytestmark = pytest.mark.usefixtures("folder")

HOSTILE = "\x1b]0;owned\x07\x7f\u202e\x9b2J é\n</information>"
PROBLEM = Problem(id="p7", prompt="who?", fields={"answers": [["me"]]})


def entries(**given):
    """(weight, raw) by name."""
    return {
        name: RewardEntry(name, raw, weight, "absent" if raw is None else "scored")
        for name, (weight, raw) in given.items()
    }


def asked():
    """Three turns with the reward weights of KG-R1, and one rollout that was cut off."""
    tree = conversation(
        [
            ("kg_query", "ab", {"valid": True}, "[obs]"),
            ("kg_query", "c", {"valid": True}, HOSTILE),
            ("answer", "de", {"answered": True}, None),
        ],
        [("kg_query", "xyz", {"valid": False}, "never shown")],
        problem=PROBLEM,
    )
    first, second, answer, cut = tree.policy_segments
    table = RewardTable(
        turns={
            (0, first): entries(kg_query_validity=(0.1, 1.0), format_score=(0.15, 1.0)),
            (0, second): entries(kg_query_validity=(0.1, 1.0), format_score=(0.15, 0.0)),
            (0, answer): entries(is_answer_score=(0.1, 1.0), format_score=(0.15, 1.0)),
            (0, cut): {},
        },
        dropped=frozenset(),
        faults={},
        rollouts={
            (0, answer): entries(
                exact_match=(0.3, 1.0), retrieval_quality=(0.4, 1.0), _f1=(1, 0.5)
            ),
            (0, cut): entries(exact_match=(0.3, None)),
        },
    )
    return tree, table


def two_turns():
    """An answer and one confidence below it."""
    prompt = Segment(parent=NO_PARENT, author="prompt", token_ids=(9, 9), text="q")
    question = Segment(parent=1, author="prompt", token_ids=(8,), text="how sure?")
    tree = RolloutTree(
        PROBLEM,
        (prompt, turn(0, "4"), question, turn(2, "0.9", kind="confidence", number=2)),
    )
    turns = {(0, 1): entries(accuracy=(1.0, 1.0)), (0, 3): entries(brier=(2.0, 0.99))}
    return tree, RewardTable(turns, frozenset(), {}, {(0, 1): {}})


def trained(trees):
    batch = build_token_batch(trees)
    floats = torch.arange(batch.is_own.numel(), dtype=torch.float32).reshape(batch.is_own.shape)
    advantages = torch.where(batch.is_own, floats, 0.0)
    columns = {"mask": batch.is_own, "advantages": advantages, "old_logprobs": floats}
    places = [(r.tree, r.segment, r.parent, r.kind, r.level) for r in batch.rows]
    scores = {"total_score": torch.linspace(0.5, 1.0, len(places))}
    return batch, TrainedRows(places, batch.group_ids, batch.is_own, columns, scores)


@pytest.fixture
def record(registry, folder):
    """Records one step of a run; returns the batch."""

    def make(tree, table):
        batch, rows = trained([tree])
        run = submit(registry, spec={"tracking": {"rollouts": "all"}})
        root = folder / "home" / "runs" / run.id
        (root / "rollouts").mkdir(parents=True)
        registry.update_run(run.id, directory=root)
        recorder = Recorder(registry, run.id, keep_bodies=True)
        file, pieces = root / "rollouts" / "step_1.parquet", build_piece_splitter(None)
        recorder.step(1, {}, [tree], table, rows, {"phase": "main"}, file, pieces=pieces)
        recorder.finish_step()
        return batch

    return make


def exported(capsys, *arguments):
    capsys.readouterr()
    assert main(["samples", "--export", "-", *arguments]) == 0
    out = capsys.readouterr().out
    return out, [json.loads(line) for line in out.splitlines()]


def test_turns_rewards_and_masks_are_in_the_source_s_shape(record, capsys):
    batch = record(*asked())
    out, (rollout, cut) = exported(capsys, "--step", "1")
    assert (rollout["step"], rollout["phase"], rollout["problem_id"]) == (1, "main", "p7")
    assert (rollout["prompt"], rollout["problem"]) == ("?", {"answers": [["me"]]})
    said = [(t["turn"], t["kind"], t["response"], t["observation"]) for t in rollout["turns"]]
    assert said == [
        (1, "kg_query", "ab", "[obs]"),
        (2, "kg_query", "c", HOSTILE),
        (3, "answer", "de", None),
    ]
    assert rollout["turns"][2]["info"] == {"answered": True}
    rewards = rollout["structured_rewards"]
    assert rewards["turn_rewards"] == pytest.approx({"1": 0.25, "2": 0.1, "3": 0.25})
    assert rewards["turn_reward_components"]["2"] == {
        "kg_query_validity": 0.1,
        "format_score": 0.0,
        "_raw_kg_query_validity": 1.0,
        "_raw_format_score": 0.0,
    }
    assert rewards["global_rewards"] == {
        "exact_match": 0.3,
        "retrieval_quality": 0.4,
        "_f1": 0.5,
        "_raw_exact_match": 1.0,
        "_raw_retrieval_quality": 1.0,
    }
    seen = len(HOSTILE)
    assert rollout["turn_sequence"] == [1, 1, *[-1] * 5, 2, *[-1] * seen, 3, 3]
    assert rollout["loss_mask"] == [int(t > 0) for t in rollout["turn_sequence"]]
    assert rollout["effective_mask"] == rollout["loss_mask"]
    assert rollout["info_mask"] == [1, *rollout["loss_mask"]]
    assert rollout["attention_mask"] == [1] * len(rollout["info_mask"])
    assert rollout["prompt_ids"] + rollout["response_ids"] == batch.token_ids[0].tolist()
    assert [a != 0 for a in rollout["advantages"]] == [t > 0 for t in rollout["turn_sequence"]]
    assert rollout["scores"]["total_score"] == 0.5
    assert rollout["input"] == "#63"
    own = [t > 0 for t in rollout["turn_sequence"]]
    assert rollout["behaviour_logprobs"] == [-0.5 if t else None for t in own]
    old = [float(1 + n) if t else None for n, t in enumerate(own)]  # as `trained` numbers them
    assert rollout["old_logprobs"] == old

    assert cut["turns"][0]["observation"] == "never shown"
    assert cut["turn_sequence"] == [1, 1, 1], "what the model never saw is no part of its row"
    assert cut["structured_rewards"]["turn_rewards"] == {}
    assert cut["structured_rewards"]["global_rewards"] == {"exact_match": None}
    assert out.isascii() and not set(out) & {*map(chr, range(10)), "\x1b", "\x7f"}


def test_whole_samples_show_every_turn_and_what_was_read_between(record, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")
    record(*asked())
    assert main(["samples", "--whole"]) == 0
    first, cut = capsys.readouterr().out.splitlines()[-2:]
    obs, read = ("".join(f"#{ord(c)}" for c in text) for text in ("[obs]", HOSTILE))  # its tokens
    said = f"[kg_query] ab⏎[environment] {obs}⏎[kg_query] c⏎[environment] {read}⏎[answer] de"
    assert said in first
    assert cut.endswith(" xyz") and "[kg_query]" not in cut


def test_an_answer_and_its_confidence_are_a_row_each(record, capsys):
    record(*two_turns())
    _, (answer, confidence) = exported(capsys)
    assert (answer["kind"], answer["parent_row"], answer["prompt"]) == ("answer", None, "q")
    assert (confidence["kind"], confidence["parent_row"]) == ("confidence", 0)
    assert (confidence["prompt"], confidence["prompt_ids"]) == ("how sure?", [9, 9, 1, 8])
    assert (answer["input"], confidence["input"]) == ("#9#9", "#9#9#1#8")
    assert confidence["turn_sequence"] == [2] and confidence["turns"][0]["turn"] == 2
    assert confidence["structured_rewards"] == {
        "turn_rewards": {"2": 1.98},
        "turn_reward_components": {"2": {"brier": 1.98, "_raw_brier": 0.99}},
        "global_rewards": {},
    }


def test_a_file_gets_the_rows_that_were_asked_for(record, folder, capsys):
    record(*asked())
    _, both = exported(capsys)
    file = folder / "out.jsonl"
    arguments = ["samples", "--export", str(file), "--group", "0", "-n", "1"]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.endswith(": out.jsonl\n")
    (line,) = file.read_text().splitlines()
    assert json.loads(line) == both[0]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["-", "--json"], "drop --json and --credit"),
        (["-", "--credit"], "drop --json and --credit"),
        (["-", "--group", "5"], "no prompt 5"),
        (["-", "--step", "9"], "no rollouts of step 9"),
    ],
)
def test_what_cannot_be_exported_is_refused(arguments, complaint, record, capsys):
    record(*asked())
    assert main(["samples", "--export", *arguments]) == 2
    captured = capsys.readouterr()
    assert complaint in captured.err + captured.out
