"""What rlx prints in a terminal goes through one console and one function, which escape it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PLATFORM = Path(__file__).parents[2] / "platform" / "rlx"

DOORS = {
    "cli/console.py": {"Console"},
    "cli/output.py": {"click.echo"},
}
"""The only files that may call these."""

EXCEPTIONS = {
    # Before click is imported; both texts are constants of rlx.
    "cli/__init__.py": {"print"},
    # A tool for developers, over a file of theirs.
    "testing/golden/__main__.py": {"click.echo"},
    # The protocol of a subprocess with its parent, which escapes what it repeats.
    "cli/plugins/health.py": {"print"},
}
PROCESSES = ("run/", "launch/", "record/", "sampler/")
"""Rooms whose processes write to a run's log; `rlx logs` escapes it."""

FORBIDDEN = {
    *("print", "Console", "Text.from_markup", "from_markup", "render_markup", "rich.print"),
    *("click.echo", "click.secho", "click.echo_via_pager", "typer.echo", "pprint"),
    *("traceback.print_exc", "traceback.print_exception", "warnings.showwarning"),
    *("sys.stdout.write", "sys.stderr.write", "sys.stdout.buffer.write"),
}
ESCAPING = {"escape_unprintable", "escape_lines"}


def spell_name(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return f"{spell_name(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def is_escaped(call: ast.Call) -> bool:
    """Whether the one thing that is printed is an escaped text."""
    (first, *more) = call.args or [None]
    return isinstance(first, ast.Call) and spell_name(first.func) in ESCAPING and not more


def list_prints(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and "Console" in map(spell_name, node.bases):
            yield node.lineno, "Console"
        if not isinstance(node, ast.Call):
            continue
        name = spell_name(node.func)
        if name in FORBIDDEN and not (name == "print" and is_escaped(node)):
            yield node.lineno, name
        plain = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
        if plain.get("markup") is True or plain.get("emoji") is True:
            yield node.lineno, "markup"
        # A column of a progress bar reads markup by itself, not as the console does.
        template = getattr(node.args[0], "value", None) if node.args else None
        filled = name.endswith("TextColumn") and not (
            isinstance(template, str) and "{" not in template
        )
        if filled and plain.get("markup") is not False:
            yield node.lineno, "TextColumn"


FILES = sorted(
    path for path in PLATFORM.rglob("*.py")
    if not str(path.relative_to(PLATFORM)).startswith(PROCESSES)
)  # fmt: skip


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PLATFORM)))
def test_nothing_prints_past_the_console(path):
    name = str(path.relative_to(PLATFORM))
    allowed = DOORS.get(name, set()) | EXCEPTIONS.get(name, set())
    found = [(line, what) for line, what in list_prints(ast.parse(path.read_text()))]
    assert not [one for one in found if one[1] not in allowed]


@pytest.mark.parametrize("name", [*DOORS, *EXCEPTIONS])
def test_every_exception_is_used(name):
    found = {what for _, what in list_prints(ast.parse((PLATFORM / name).read_text()))}
    assert found == DOORS.get(name, set()) | EXCEPTIONS.get(name, set())


@pytest.mark.parametrize(
    "line",
    [
        *(
            "print(text)",
            "print(escape_lines(a), b)",
            "Console()",
            "class A(Console): pass",
            "click.echo(escape_lines(a))",
        ),
        *("Text.from_markup(a)", "console.print(a, markup=True)", "sys.stderr.write(a)"),
        *("TextColumn('{task.description}')", "TextColumn(name)"),
    ],
)
def test_a_way_past_is_seen(line):
    assert list(list_prints(ast.parse(line)))


@pytest.mark.parametrize(
    "line",
    [
        *("print(escape_unprintable(a), flush=True)", "console.print(a)", "print_text(a)"),
        *("TextColumn('scoring')", "TextColumn('{task.fields[note]}', markup=False)"),
    ],
)
def test_what_escapes_is_not_taken_for_one(line):
    assert not list(list_prints(ast.parse(line)))
