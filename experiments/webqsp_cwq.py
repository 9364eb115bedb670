"""Writes WebQSP or CWQ with each question's part of Freebase, as KG-R1 uses them.

    python experiments/webqsp_cwq.py cwq                        # from the Hugging Face hub
    python experiments/webqsp_cwq.py webqsp --train A.parquet --test B.parquet C.parquet

Reads the form of RoG (rmanluo/RoG-webqsp and RoG-cwq on the hub; columns `id`, `question`,
`answer`, `q_entity` and `graph`), and writes train.jsonl.gz and test.jsonl.gz, which the task `kg`
reads. Names without a visible character cannot be asked for: they are left out, facts as a whole,
and counted.
"""

import argparse
import gzip
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import Any

from rlx_plugins.kg.text import has_visible_text
from rlx_plugins.records import Source, get_value_at_path

HUB = {"webqsp": "rmanluo/RoG-webqsp", "cwq": "rmanluo/RoG-cwq"}
SPLITS = "train", "test"


def convert(record: Mapping[str, Any], counts: Counter[str]) -> dict[str, Any]:
    """A question as the task `kg` reads it; counts what is left out.

    Raises:
        ValueError: a column is missing or malformed; the message names it.
    """
    question = get_value_at_path(record, "question")
    if not is_name(question):
        raise ValueError(f"question: expected text, got {question!r}")
    made = {
        "id": str(get_value_at_path(record, "id")),
        "question": question,
        "answer": select_names(record, "answer", counts),
        "q_entity": select_names(record, "q_entity", counts),
        "graph": select_facts(record, counts),
    }
    entities = {name for s, _, o in made["graph"] for name in (s, o)}
    counts["questions"] += 1
    counts["facts"] += len(made["graph"])
    counts["answered"] += bool(made["answer"])
    counts["reachable"] += not entities.isdisjoint(made["answer"])
    return made


def is_name(value: Any) -> bool:
    """Whether a value is text with a visible character."""
    return isinstance(value, str) and has_visible_text(value)


def select_names(record: Mapping[str, Any], column: str, counts: Counter[str]) -> list[str]:
    """The visible names in a column."""
    names = get_list(record, column)
    visible = [name for name in names if is_name(name)]
    counts["names left out"] += len(names) - len(visible)
    return visible


def select_facts(record: Mapping[str, Any], counts: Counter[str]) -> list[list[str]]:
    """The facts whose three parts are visible."""
    facts = get_list(record, "graph")
    for number, fact in enumerate(facts, start=1):
        if not isinstance(fact, list) or len(fact) != 3:
            raise ValueError(f"graph: expected three parts as fact {number}, got {fact!r}")
    visible = [fact for fact in facts if all(map(is_name, fact))]
    counts["facts left out"] += len(facts) - len(visible)
    return visible


def get_list(record: Mapping[str, Any], column: str) -> list[Any]:
    """The list in a column."""
    value = get_value_at_path(record, column)
    if not isinstance(value, list):
        raise ValueError(f"{column}: expected a list, got {value!r}")
    return value


def read(source: Source, counts: Counter[str]) -> Iterator[dict[str, Any]]:
    """Yields the questions of a source."""
    for where, record in source.rows():
        try:
            yield convert(record, counts)
        except ValueError as error:
            raise SystemExit(f"{where}: not in the form of RoG: {error}") from None


def write(path: Path, source: Source, limit: int | None) -> Counter[str]:
    """Writes the questions of a source; the file appears when it is complete."""
    counts: Counter[str] = Counter()
    part = path.with_name(f"{path.name}.part")
    with (
        part.open("wb") as raw,
        gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed,
        TextIOWrapper(packed, encoding="utf-8", newline="\n") as stream,
    ):
        for question in islice(read(source, counts), limit):
            stream.write(json.dumps(question, ensure_ascii=False) + "\n")
    if not counts["questions"]:
        raise SystemExit(f"{path}: its source holds no question")
    part.replace(path)
    return counts


def describe(counts: Counter[str]) -> str:
    """What was written, in words."""
    total = counts["questions"]
    text = (
        f"{total} questions, {counts['answered']} with an answer, {counts['reachable']} with an "
        f"answer in their graph, {counts['facts'] / total:.0f} facts each"
    )
    gone = [f"{counts[what]} {what}" for what in ("facts left out", "names left out")]
    return ", ".join([text, *(words for words in gone if not words.startswith("0 "))])


def main(arguments: list[str] | None = None) -> None:
    """Writes both splits."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", choices=HUB, help="the data set")
    for split in SPLITS:
        parser.add_argument(
            f"--{split}", type=Path, nargs="+", help="JSON Lines or Parquet, in place of the hub"
        )
    parser.add_argument("--limit", type=int, help="only the first questions of each split")
    parser.add_argument("--to", type=Path, help="folder (default: .rlx/data/NAME)")
    options = parser.parse_args(arguments)
    folder = options.to or Path(".rlx/data") / options.name
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        files = getattr(options, split)
        hub = {"hub": HUB[options.name], "split": split}
        source = Source.model_validate({"path": files} if files else hub)
        path = folder / f"{split}.jsonl.gz"
        print(f"{path}: {describe(write(path, source, options.limit))}")


if __name__ == "__main__":
    main()
