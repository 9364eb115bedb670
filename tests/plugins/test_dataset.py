"""The task `dataset`: records from real files to problems, and what is said of those that fail."""

import datetime
import decimal
import gzip
import json
import os
import sys
from collections import Counter
from importlib import import_module

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from rows import each_row

from rlx.plugin import Demonstration, Message, Task
from rlx_plugins import records
from rlx_plugins.dataset import Dataset
from rlx_plugins.judge import Judge
from rlx_plugins.mathematics import MathVerify
from rlx_plugins.records import convert_to_plain_json, get_value_at_path

RECORDS = [
    {"question": f"{n} + 1?", "level": n % 3, "reward_model": {"ground_truth": str(n + 1)}}
    for n in range(20)
]
MAPPED = {
    "prompt": "{question}\n",
    "fields": {"question": "question", "answer": "reward_model.ground_truth", "level": "level"},
}


def jsonl(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def problems(task, split="test", seed=0):
    """All problems of a split, in the order of its first pass."""
    count = len(task._splits()[split])
    return [task.problem(split, i, seed) for i in range(count)]


def of_records(tmp_path, *rows, **options):
    """A task that tests on these records."""
    train = jsonl(tmp_path / "train.jsonl", [{"prompt": "another", "answer": "1", "how": "so"}])
    test = jsonl(tmp_path / "test.jsonl", rows)
    return Dataset(train={"path": train}, test={"path": test}, **options)


# Records to problems ------------------------------------------------------------------------------


@each_row("write", [jsonl, parquet])
def test_fields_are_mapped_by_dotted_paths(tmp_path, write):
    parts = [write(tmp_path / f"{i}.{write.__name__}", RECORDS[i::2]) for i in (0, 1)]
    task = Dataset(train={"path": parts}, held_out=0.3, stratum="level", **MAPPED)
    assert isinstance(task, Task)
    every = problems(task, "train") + problems(task, "test")
    assert sorted(p.prompt for p in every) == sorted(f"{r['question']}\n" for r in RECORDS)
    for p in every:
        n = int(p.fields["answer"]) - 1
        assert p.fields == {"question": f"{n} + 1?", "answer": str(n + 1), "level": n % 3}
        assert (p.stratum, p.system) == (str(n % 3), "")


def test_without_a_mapping_all_fields_are_taken_and_the_prompt_is_called_prompt(tmp_path):
    row = {"prompt": "1 + 1?", "answer": 2, "data_source": "sums", "extra": {"by": [None, True]}}
    (problem,) = problems(of_records(tmp_path, row))
    assert (problem.prompt, problem.fields) == ("1 + 1?", row)


def test_a_prompt_may_be_a_chat(tmp_path):
    user = {"role": "user", "content": "1 + {x}?"}
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    rows = [
        {"prompt": [user], "answer": "2"},
        {"prompt": [{"role": "system", "content": "Be brief."}, user], "answer": "2"},
        {"prompt": [*said, user], "answer": "2"},
    ]
    asked = problems(of_records(tmp_path, *rows, prompt="Q: {prompt}"))
    history = (Message("user", "Hi"), Message("assistant", "Yes?"))
    assert [(p.system, p.history) for p in asked] == [("", ()), ("Be brief.", ()), ("", history)]
    assert {p.prompt for p in asked} == {"Q: 1 + {x}?"}
    assert len({p.id for p in asked}) == 3


def test_what_a_record_holds_is_never_a_template(tmp_path):
    row = {"prompt": "{answer} {0} {", "answer": "{prompt}"}
    (problem,) = problems(of_records(tmp_path, row, prompt="{{{prompt}}} {answer}"))
    assert problem.prompt == "{{answer} {0} {} {prompt}"


def test_only_so_many_records_are_looked_at(tmp_path):
    path = jsonl(tmp_path / "some.jsonl", [{"prompt": str(n)} for n in range(5)])
    path.write_text(path.read_text() + "not JSON\n")
    task = Dataset(train={"path": path, "limit": 3}, held_out=0.5)
    every = problems(task, "train") + problems(task, "test")
    assert sorted(p.prompt for p in every) == ["0", "1", "2"]


def test_worked_episodes_come_from_templates(tmp_path):
    rows = [{"prompt": "1 + 1?", "how": "one and one", "answer": 2}]
    turns = ["<think>{how}</think><answer>{answer}</answer>", "<confidence>1</confidence>"]
    task = of_records(tmp_path, *rows, demonstrations=turns)
    (problem,) = problems(task)
    assert task.demonstration(problem, 0) == Demonstration(
        ("<think>one and one</think><answer>2</answer>", "<confidence>1</confidence>")
    )
    with pytest.raises(NotImplementedError, match="demonstrations"):
        of_records(tmp_path, *rows).demonstration(problem, 0)


# Identity, order, splits --------------------------------------------------------------------------


def test_ids_follow_what_a_problem_says_and_nothing_else(tmp_path):
    one = problems(
        Dataset(train={"path": jsonl(tmp_path / "a.jsonl", RECORDS)}, held_out=0.5, **MAPPED)
    )
    other = parquet(tmp_path / "b.parquet", RECORDS[::-1])
    two = problems(Dataset(train={"path": other}, held_out=0.5, **MAPPED))
    assert {p.id for p in one} == {p.id for p in two}
    assert one[0].id == "99379d185029b240", "runs of earlier versions are compared on it"


def test_training_is_shuffled_anew_each_pass_and_testing_is_not(tmp_path):
    rows = [{"prompt": f"t{n}"} for n in range(8)]
    task = Dataset(
        train={"path": jsonl(tmp_path / "a.jsonl", [{"prompt": str(n)} for n in range(30)])},
        test={"path": jsonl(tmp_path / "b.jsonl", rows)},
    )

    def taken(first, seed=0):
        return [task.problem("train", first + i, seed).prompt for i in range(30)]

    assert sorted(taken(0)) == sorted(taken(30)) == sorted(map(str, range(30)))
    assert len({tuple(taken(0)), tuple(taken(30)), tuple(taken(0, seed=1))}) == 3
    assert taken(30) == [task.problem("train", i, 0).prompt for i in reversed(range(30, 60))][::-1]
    assert [task.problem("test", i, 5).prompt for i in range(10)] == [
        f"t{n % 8}" for n in range(10)
    ]


@settings(max_examples=15)
@given(st.lists(st.integers(0, 99), min_size=1, max_size=40), st.randoms(use_true_random=False))
def test_held_out_problems_are_chosen_by_what_they_say(tmp_path_factory, numbers, rng):
    folder = tmp_path_factory.mktemp("held")
    every = [*range(100), *numbers]
    chosen = []
    for name in ("a.jsonl", "b.jsonl"):
        path = jsonl(folder / name, [{"prompt": str(n), "at": i} for i, n in enumerate(every)])
        task = Dataset(train={"path": path}, held_out=0.25)
        train, test = problems(task, "train"), problems(task, "test")
        assert len(train) + len(test) == len(every)
        assert not {p.prompt for p in train} & {p.prompt for p in test}
        chosen.append({p.prompt for p in test})
        rng.shuffle(every)
    assert chosen[0] == chosen[1]
    assert 15 <= len(chosen[0]) <= 35


def test_train_and_test_share_no_problem(tmp_path):
    train = jsonl(tmp_path / "train.jsonl", [{"prompt": str(n), "from": "a"} for n in range(5)])
    test = jsonl(tmp_path / "test.jsonl", [{"prompt": str(n), "from": "b"} for n in (3, 9, 4)])
    task = Dataset(train={"path": train}, test={"path": test})
    with pytest.raises(
        ValueError, match=r"train\.jsonl line 4: also .*test\.jsonl line 1.* 2 of 5"
    ):
        task.check()
    kept = Dataset(train={"path": train}, test={"path": test}, duplicates="drop")
    assert sorted(p.prompt for p in problems(kept, "train")) == ["0", "1", "2"]
    assert [p.prompt for p in problems(kept)] == ["3", "9", "4"]


# What is wrong, and where -------------------------------------------------------------------------


@each_row(
    ("row", "options", "message"),
    [
        ({"promt": "x"}, {}, "there is no 'prompt'; did you mean 'promt'?"),
        ({"x": 1, "y": 2}, {}, "there is no 'prompt'; there are 'x', 'y'"),
        (
            {"prompt": "x", "reward_model": {"ground_truth": 1}},
            {"fields": {"prompt": "prompt", "answer": "reward_model.truth"}},
            "there is no 'reward_model.truth'; did you mean 'reward_model.ground_truth'?",
        ),
        ({"prompt": None}, {}, "'prompt' must be text or a number, got None"),
        ({"prompt": " \n"}, {}, "the prompt is empty"),
        ({"prompt": "x", "answer": float("nan")}, {}, "'answer': nan is not a finite number"),
        ({"prompt": "\ud800"}, {}, "'prompt': a lone surrogate is not a character"),
        (
            {"prompt": []},
            {},
            "'prompt': messages are perhaps one of the system, then user and assistant in turns, "
            "the user first and last; got none",
        ),
        (
            {"prompt": [{"role": r, "content": "x"} for r in ("user", "assistant")]},
            {},
            "got user, assistant",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
            {},
            "'prompt.0.content' must be text or a number, got [{'type': 'image'}]",
        ),
        ({"prompt": "x", "level": [1]}, {"stratum": "level"}, "'level' must be text or a number"),
        (
            {"prompt": "x", "how": None},
            {"demonstrations": ["{how}"]},
            "'how' must be text or a number, got None",
        ),
        ({"prompt": {"\x1b[2J": "x"}}, {}, r"got {'\x1b[2J': 'x'}"),
    ],
)
def test_a_bad_record_is_named_by_its_line(tmp_path, row, options, message):
    fine = {"prompt": "fine", "how": "so", "level": 1, "reward_model": {"truth": 1}}
    train = jsonl(tmp_path / "train.jsonl", [{**fine, "prompt": "another"}])
    test = jsonl(tmp_path / "test.jsonl", [fine, row])
    with pytest.raises(ValueError) as caught:
        Dataset(train={"path": train}, test={"path": test}, **options).check()
    assert str(caught.value).startswith(f"{test} line 2: ")
    assert message in str(caught.value)


@each_row(
    ("line", "message"),
    [(b"{", "not JSON: "), (b"[1]", "not a JSON object"), (b'"\xff"', "not UTF-8")],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"prompt": "1"}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=rf"bad\.jsonl line 3: {message}"):
        Dataset(train={"path": path}, held_out=0.5).check()


@each_row("name", ["all.jsonl", "all.jsonl.gz"])
def test_a_byte_order_mark_and_gzip_are_read_through(tmp_path, name):
    lines = "".join(f"{json.dumps(row)}\n" for row in RECORDS).encode("utf-8-sig")
    path = tmp_path / name
    path.write_bytes(gzip.compress(lines) if name.endswith(".gz") else lines)
    assert [row for _, row in records.Source(path=path).rows()] == RECORDS
    path.write_bytes(gzip.compress(lines)[:-9])
    with pytest.raises(ValueError, match=rf"{name}: not readable as gzip"):
        list(records.Source(path=path).rows())


def test_a_row_of_parquet_is_named_across_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "_BATCH", 4)
    rows = [{"prompt": str(n)} for n in range(9)] + [{"prompt": None}]
    path = parquet(tmp_path / "rows.parquet", rows)
    with pytest.raises(ValueError, match=r"rows\.parquet row 10: 'prompt' must be text"):
        Dataset(train={"path": path}, held_out=0.5).check()


def test_files_that_are_not_what_they_are_called(tmp_path):
    cut = parquet(tmp_path / "cut.parquet", RECORDS)
    cut.write_bytes(cut.read_bytes()[:100])
    empty = jsonl(tmp_path / "empty.jsonl", [])
    for path, message in ((cut, "not readable as Parquet"), (empty, "holds no record")):
        with pytest.raises(ValueError, match=rf"{path.name}: .*{message}"):
            Dataset(train={"path": path}, held_out=0.5).check()


def test_a_missing_file_is_a_fault_of_the_machine(tmp_path):
    with pytest.raises(OSError, match=r"cannot read .*nowhere\.jsonl: No such file") as caught:
        Dataset(train={"path": tmp_path / "nowhere.jsonl"}, held_out=0.5).check()
    assert not isinstance(caught.value, ValueError) and "did you mean" not in str(caught.value)
    (tmp_path / "train.jsonl").write_text("{}\n")
    with pytest.raises(OSError, match=r"No such file or directory; did you mean train\.jsonl\?"):
        Dataset(train={"path": tmp_path / "trian.jsonl"}, held_out=0.5).check()
    with pytest.raises(OSError, match="a dataset of the hub is named by `hub: openai/gsm8k`"):
        Dataset(train={"path": "openai/gsm8k"}, held_out=0.5).check()


HERE = {"path": "a.jsonl"}


@each_row(
    ("options", "message"),
    [
        ({"train": HERE}, "needs either `test` or `held_out`"),
        ({"train": HERE, "test": HERE, "held_out": 0.1}, "needs either `test` or `held_out`"),
        ({"train": {}, "held_out": 0.1}, "either `path` or `hub`"),
        ({"train": {**HERE, "hub": "x/y"}, "held_out": 0.1}, "either `path` or `hub`"),
        ({"train": {"hub": "x/y"}, "held_out": 0.1}, "`hub` needs a `split`"),
        ({"train": {**HERE, "config": "main"}, "held_out": 0.1}, "belong to `hub`"),
        ({"train": {"hub": ".", "split": "train"}, "held_out": 0.1}, "is a folder"),
        ({"train": {"path": []}, "held_out": 0.1}, "empty list"),
        ({"train": {"path": ["a.jsonl", "b.json"]}, "held_out": 0.1}, "b.json: its name must"),
        ({"train": HERE, "held_out": 0.1, "prompt": "{x!r}"}, "a name in braces"),
        ({"train": HERE, "held_out": 0.1, "prompt": "{"}, "prompt"),
        ({"train": HERE, "held_out": 0.1, "demonstrations": ["{x:>9}"]}, "a name in braces"),
        (
            {"train": HERE, "held_out": 0.1, "fields": {"question": "q"}},
            "prompt names 'prompt', but `fields` has only question",
        ),
        (
            {"train": HERE, "held_out": 0.1, "fields": {"prompt": "q"}, "stratum": "level"},
            "stratum names 'level'",
        ),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        Dataset(**options)


# Values -------------------------------------------------------------------------------------------


@each_row(
    ("value", "expected"),
    [
        (datetime.date(2025, 3, 1), "2025-03-01"),
        (datetime.datetime(2025, 3, 1, 12, tzinfo=datetime.UTC), "2025-03-01T12:00:00+00:00"),
        (decimal.Decimal("1.10"), 1.1),
        (decimal.Decimal("72.00"), 72),
        (decimal.Decimal("0.12345678901234567890"), "0.12345678901234567890"),
        ({"a": (1, None)}, {"a": [1, None]}),
    ],
)
def test_values_become_plain_json(value, expected):
    made = convert_to_plain_json(value)
    assert made == expected
    assert json.loads(json.dumps(made)) == expected


def test_paths_reach_into_lists_and_past_dots():
    record = {"a.b": 1, "choices": [{"text": "x"}], "a": {"c.d": 2}}
    assert [get_value_at_path(record, p) for p in ("a.b", "choices.0.text", "a.c.d")] == [1, "x", 2]
    with pytest.raises(ValueError, match=r"no 'choices\.1\.text'"):
        get_value_at_path(record, "choices.1.text")


# Reading once -------------------------------------------------------------------------------------


def test_a_file_is_read_once_until_it_changes(tmp_path, monkeypatch):
    opened = Counter()
    real = records._open_binary_file
    monkeypatch.setattr(
        records, "_open_binary_file", lambda p: (opened.update([p.name]), real(p))[1]
    )
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": str(n)} for n in range(9)])
    for _ in range(3):
        task = Dataset(train={"path": path}, held_out=0.5)
        task.check()
        problems(task, "train")
    assert opened == {"a.jsonl": 1}
    jsonl(path, [{"prompt": f"new {n}"} for n in range(9)])
    os.utime(path, ns=(1, 1))
    assert all(p.prompt.startswith("new") for p in problems(task, "train"))
    assert opened == {"a.jsonl": 2}


# Hugging Face datasets ----------------------------------------------------------------------------


def test_datasets_of_the_hub_are_read_at_a_revision_or_said_to_be_away(monkeypatch):
    datasets = import_module("datasets")  # slow
    rows = datasets.Dataset.from_list([{"prompt": str(n), "answer": n} for n in range(4)])
    asked = []

    def load_dataset(name, config, **options):
        if name == "nobody/nothing":
            raise FileNotFoundError("no such dataset")
        asked.append((name, config, options))
        return rows.select([3, 2, 1, 0])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = {"hub": "some/sums", "config": "main", "revision": "v1", "split": "train"}
    task = Dataset(train=source, held_out=0.5)
    assert {p.prompt for split in task._splits().values() for _, p in split} == set("0123")
    assert asked == [("some/sums", "main", {"revision": "v1", "split": "train"})]
    with pytest.raises(OSError, match=r"cannot read nobody/nothing \(train\).* in the cache"):
        Dataset(train={"hub": "nobody/nothing", "split": "train"}, held_out=0.5)._splits()


@each_row(
    ("plugin", "library", "extra"),
    [
        (Dataset(train={"hub": "a/b", "split": "train"}, held_out=0.5), "datasets", "huggingface"),
        (MathVerify(), "math_verify", "math"),
        (Judge(model="m"), "openai", "judge"),
    ],
)
def test_a_missing_library_says_how_to_install_it(monkeypatch, plugin, library, extra):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=rf"pip install ['\"]rlx\[{extra}\]"):
        plugin.check()


def test_data_of_the_hub_have_a_digest_too(tmp_path, monkeypatch):
    rows = [{"prompt": f"{n}?", "answer": n} for n in range(4)]
    (tmp_path / "own.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    monkeypatch.setattr(
        records, "_load_hub_rows", lambda *_: ((f"row {n}", row) for n, row in enumerate(rows))
    )
    path = {"path": str(tmp_path / "own.jsonl")}
    (own,) = Dataset(train=path, held_out=0.5).data().values()
    hub = Dataset(train={"hub": "some/thing", "split": "train"}, held_out=0.5)
    assert hub.data() == {"train some/thing": own}
