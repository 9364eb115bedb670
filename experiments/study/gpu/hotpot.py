"""Writes HotpotQA-modified as in RLCR: two of ten paragraphs removed, up to two of them relevant.

    python experiments/study/gpu/hotpot.py                            # from the Hugging Face hub
    python experiments/study/gpu/hotpot.py --train A.jsonl --test B.parquet --to FOLDER

Reads the distractor setting in the hub's format, and writes train.jsonl, test.jsonl and, with all
ten paragraphs, vanilla.jsonl. The number of relevant paragraphs to remove is uniform and seeded by
the question's id, so a record always gives the same question, independent of the order.
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
"""Exclusive upper bound on the characters of question and paragraphs together."""
COUNTS = {"train": 20_000, "test": 500, "vanilla": 1000}


def modified(record: Mapping[str, Any], taken: int = TAKEN) -> dict[str, Any] | None:
    """A question without `taken` of its paragraphs; None if it is too long or irregular.

    Raises:
        KeyError: the record is not from HotpotQA's distractor setting.
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
    """Yields the suitable questions of a file, or of the hub if `file` is None."""
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
    options = parser.parse_args(arguments)
    options.to.mkdir(parents=True, exist_ok=True)
    found = {
        "train": read(options.train, "train"),
        "test": read(options.test, "validation"),
        "vanilla": read(options.test, "validation", taken=0),
    }
    for name, questions in found.items():
        lines = [json.dumps(q, ensure_ascii=False) for q in islice(questions, COUNTS[name])]
        path = options.to / f"{name}.jsonl"
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        print(f"{path}: {len(lines)} questions, {COUNTS[name]} are wanted")


if __name__ == "__main__":
    main()
