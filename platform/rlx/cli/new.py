"""`rlx new`: writes an experiment file from one of the shipped examples."""

import re
from pathlib import Path

import click

from rlx.cli.output import print_text
from rlx.errors import SpecError
from rlx.home import format_path
from rlx.plugin_files import list_plugin_files
from rlx.spec.reading import did_you_mean, find_examples, parse_yaml_document
from rlx.text import escape_unprintable, write_text_file

FIRST = "my_data"
"""The example that most people come for."""

_SHIPPED = re.compile(r"\bexperiments/([\w./-]*\w)")


@click.command()
@click.option(
    "--from",
    "example",
    metavar="EXAMPLE",
    help="The example to copy; without it, all are listed.",
)
@click.argument("file", required=False, type=click.Path(path_type=Path))
def new(example: str | None, file: Path | None) -> None:
    """Write an example experiment to FILE, by default EXAMPLE.yaml in this folder; `-` is stdout.

    Data and scripts that an example names come with it, in experiments/ of the current folder; its
    first lines name what is to be fetched. An existing file is not overwritten.
    """
    examples = find_examples()
    if example is None and file is not None:
        raise SpecError("name the example to copy, as in --from rlcr; `rlx new` lists them")
    if example is None:
        listed = sorted(examples.items(), key=lambda item: (item[0] != FIRST, item[0]))
        rows = [(name, _read_summary(found)) for name, found in listed]
        from rlx.cli.tables import print_table

        print_table("EXAMPLE", "SUMMARY", rows=rows)
        print_text("\nwrite one:  rlx new --from rlcr")
        return
    if example not in examples:
        near = did_you_mean(example, examples)
        hint = f"did you mean {near!r}?" if near else f"there are: {', '.join(sorted(examples))}"
        raise SpecError(f"there is no example {escape_unprintable(example)!r}; {hint}")
    text = examples[example].read_text(encoding="utf-8")
    if str(file) == "-":
        print_text(text, nl=False)
        return
    target = file or Path(f"{example}.yaml")
    if target.exists():
        raise SpecError(f"{escape_unprintable(str(target))} exists already; name another FILE")
    write_text_file(target, text)
    # Python files that the example names as plugins; those that are there stay.
    for name in list_plugin_files(parse_yaml_document(text, example).tree):
        _copy_file(examples[example].parent / name, target.parent / name)
    # Data and scripts that it names by their place in a checkout, relative to the current folder.
    for name in dict.fromkeys(_SHIPPED.findall(text)):
        source = examples[example].parent / name
        if source.suffix in (".jsonl", ".py") and source.is_file():
            _copy_file(source, Path("experiments", name))
    path = escape_unprintable(format_path(target))
    print_text(f"wrote {path}\n  check it:  rlx validate {path}\n  run it:    rlx submit {path}")


def _copy_file(source: Path, target: Path) -> None:
    if not target.exists():
        write_text_file(target, source.read_text(encoding="utf-8"))
        print_text(f"wrote {escape_unprintable(format_path(target))}")


def _read_summary(example: Path) -> str:
    """The first sentence of the comment that an example begins with."""
    lines = example.read_text(encoding="utf-8").splitlines()
    comment = next((n for n, line in enumerate(lines) if not line.startswith("#")), len(lines))
    text = " ".join(line.lstrip("# ") for line in lines[:comment])
    return text.partition(". ")[0].partition(": ")[0].rstrip(".")
