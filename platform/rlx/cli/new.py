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
_EXTENDING = """\
# Write what differs from the example {0}; `rlx validate --values` prints every value.
extends: {0}
"""


@click.command()
@click.option(
    "--from",
    "example",
    metavar="EXAMPLE",
    help="The example to copy; without it, all are listed.",
    shell_complete=lambda *given: _complete_example(given[-1]),
)
@click.option(
    "--extends", "is_short", is_flag=True, help="Write a file that changes values of the example."
)
@click.argument("file", required=False, type=click.Path(path_type=Path))
def new(example: str | None, is_short: bool, file: Path | None) -> None:
    """Write an example experiment to FILE, by default EXAMPLE.yaml in this folder; `-` is stdout.

    Data and scripts that an example names come with it, in experiments/ of the current folder; its
    first lines name what is to be fetched. An existing file is not overwritten.
    """
    examples = find_examples()
    if example is None and (is_short or file is not None):
        raise SpecError("name the example to copy, as in --from rlcr; `rlx new` lists them")
    if example is None:
        listed = sorted(examples.items(), key=lambda item: (item[0] != FIRST, item[0]))
        rows = [(name, _read_summary(found)) for name, found in listed]
        from rlx.cli.console import print_table

        print_table("EXAMPLE", "SUMMARY", rows=rows)
        print_text("\nwrite one:  rlx new --from rlcr")
        return
    if example not in examples:
        near = did_you_mean(example, examples)
        hint = f"did you mean {near!r}?" if near else f"there are: {', '.join(sorted(examples))}"
        raise SpecError(f"there is no example {escape_unprintable(example)!r}; {hint}")
    whole = examples[example].read_text(encoding="utf-8")
    text = _EXTENDING.format(example) if is_short else whole
    if str(file) == "-":
        print_text(text, nl=False)
        return
    target = file or Path(f"{example}.yaml")
    if target.exists():
        raise SpecError(f"{escape_unprintable(str(target))} exists already; name another FILE")
    write_text_file(target, text)
    if not is_short:
        _copy_plugin_files(examples[example], target)
    _copy_shipped_files(examples[example].parent, whole)
    path = escape_unprintable(format_path(target))
    print_text(f"wrote {path}\n  check it:  rlx validate {path}\n  run it:    rlx submit {path}")


def _copy_plugin_files(example: Path, target: Path) -> None:
    """Copies the Python files that an example names as plugins; those that are there stay."""
    text = example.read_text(encoding="utf-8")
    for name in list_plugin_files(parse_yaml_document(text, str(example)).tree):
        copied = target.parent / name
        if not copied.exists():
            write_text_file(copied, (example.parent / name).read_text(encoding="utf-8"))
            print_text(f"wrote {escape_unprintable(format_path(copied))}")


def _copy_shipped_files(shipped: Path, text: str) -> None:
    """Copies data and scripts that an example names by their place in a checkout, `experiments/…`;
    such names are relative to the current folder. Those that are there stay."""
    for name in dict.fromkeys(_SHIPPED.findall(text)):
        source, copied = shipped / name, Path("experiments", name)
        if source.suffix in (".jsonl", ".py") and source.is_file() and not copied.exists():
            write_text_file(copied, source.read_text(encoding="utf-8"))
            print_text(f"wrote {copied}")


def _read_summary(example: Path) -> str:
    """The first sentence of the comment that an example begins with."""
    lines = example.read_text(encoding="utf-8").splitlines()
    comment = next((n for n, line in enumerate(lines) if not line.startswith("#")), len(lines))
    text = " ".join(line.lstrip("# ") for line in lines[:comment])
    return text.partition(". ")[0].partition(": ")[0].rstrip(".")


def _complete_example(incomplete: str) -> list[str]:
    return [name for name in sorted(find_examples()) if name.startswith(incomplete)]
