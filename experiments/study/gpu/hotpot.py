"""HotpotQA as RLCR changes it: two of ten paragraphs go, with none, one or both that matter.

    python experiments/study/gpu/hotpot.py                            # from the Hugging Face hub
    python experiments/study/gpu/hotpot.py --train A.jsonl --test B.parquet --to FOLDER

Reads the distractor setting as the hub has it, and writes train.jsonl, test.jsonl and, with all ten
paragraphs, vanilla.jsonl. How many paragraphs that matter are taken away is drawn evenly for every
question, by its id: the same records give the same files, whatever their order.
"""

import argparse
import json
import random
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from rlx_plugins.records import Source

PARAGRAPHS, TAKEN, MATTER = 10, 2, 2
LONGEST = 6000
"""Characters of question and paragraphs together stay below it."""
COUNTS = {"train": 20_000, "test": 500, "vanilla": 1000}


def modified(record: Mapping[str, Any], taken: int = TAKEN) -> dict[str, Any] | None:
    """One question without `taken` of its paragraphs; None where it does not fit.

    Raises:
        KeyError: the record is not one of HotpotQA's distractor setting.
    """
    titles = list(record["context"]["title"])
    matter = sorted(set(record["supporting_facts"]["title"]))
    if len(set(titles)) != PARAGRAPHS or len(matter) != MATTER or not set(matter) < set(titles):
        return None
    rng = random.Random(f"hotpot {record['id']}")
    removed = rng.randrange(MATTER + 1) if taken else 0
    others = [title for title in titles if title not in matter]
    gone = {*rng.sample(matter, removed), *rng.sample(others, taken - removed)}
    texts = zip(titles, record["context"]["sentences"], strict=True)
    kept = ["".join(sentences).strip() for title, sentences in texts if title not in gone]
    paragraphs = "\n\n".join(f"[{number}] {text}" for number, text in enumerate(kept, start=1))
    if len(record["question"]) + len(paragraphs) >= LONGEST:
        return None
    names = ("id", "question", "answer", "type")
    return {**{n: record[n] for n in names}, "paragraphs": paragraphs, "removed": removed}


def read(file: Path | None, split: str, taken: int = TAKEN) -> Iterator[dict[str, Any]]:
    """The questions of a file, or of the hub where none is named, that fit."""
    hub = {"hub": "hotpotqa/hotpot_qa", "config": "distractor", "split": split}
    source = Source.model_validate({"path": file} if file else hub)
    for where, record in source.rows():
        try:
            made = modified(record, taken)
        except (KeyError, TypeError) as error:
            raise SystemExit(f"{where}: not HotpotQA's distractor setting: {error}") from None
        if made is not None:
            yield made


def main(arguments: list[str] | None = None) -> None:
    """Writes the three files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--train", type=Path, help="JSON Lines or Parquet, in place of the hub")
    parser.add_argument("--test", type=Path, help="the same, of the validation split")
    parser.add_argument("--to", type=Path, default=Path(".rlx/data/hotpot"), help="%(default)s")
    asked = parser.parse_args(arguments)
    asked.to.mkdir(parents=True, exist_ok=True)
    found = {
        "train": read(asked.train, "train"),
        "test": read(asked.test, "validation"),
        "vanilla": read(asked.test, "validation", taken=0),
    }
    for name, questions in found.items():
        lines = [json.dumps(q, ensure_ascii=False) for q in islice(questions, COUNTS[name])]
        path = asked.to / f"{name}.jsonl"
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        print(f"{path}: {len(lines)} questions, {COUNTS[name]} are wanted")


if __name__ == "__main__":
    main()
