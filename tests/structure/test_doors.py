"""Promises about rooms and names: doors, circles, one meaning to a class, the field's words."""

import ast
from collections import Counter, defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("platform", "plugins", "registry", "web")
RLX = ROOT / "platform" / "rlx"


def module_name(path: Path) -> str:
    for base in ("plugins/rlx-guess", "plugins/rlx-example", *SOURCES):
        if path.is_relative_to(ROOT / base):
            parts = path.relative_to(ROOT / base).with_suffix("").parts
            return ".".join(parts).removesuffix(".__init__")
    raise ValueError(path)


MODULES = {
    module_name(path): ast.parse(path.read_text())
    for base in SOURCES
    for path in sorted((ROOT / base).rglob("*.py"))
    if "migrations" not in path.parts and "tests" not in path.parts
}
ROOMS = {module_name(path) for path in RLX.rglob("__init__.py")} - {"rlx"}


def offered(module: str) -> set[str]:
    """What a door names, which may also be the name of one of its files."""
    defined = {
        alias.asname or alias.name
        for node in MODULES[module].body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return defined if module in ROOMS else set()


def imported_modules(name: str, tree: ast.Module) -> set[str]:
    """Modules of ours that one imports, wherever in it: at the top, lazily, for types alone."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                is_file = below in MODULES and alias.name not in offered(node.module)
                found.add(below if is_file else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & MODULES.keys() - {name}


def room_of(module: str) -> str:
    """The room that a module is in: the longest that its name begins with."""
    within = [room for room in ROOMS if module == room or module.startswith(f"{room}.")]
    return max(within, key=len, default="")


def test_every_room_has_a_door_that_says_what_it_knows():
    for folder in (path for path in RLX.rglob("*") if path.is_dir() and list(path.glob("*.py"))):
        door = folder / "__init__.py"
        assert door.exists(), folder
        docs = ast.get_docstring(ast.parse(door.read_text())) or ""
        assert len(docs.split()) >= 8, f"{door}: say what the room knows"


@pytest.mark.parametrize("name", sorted(MODULES))
def test_rooms_are_entered_by_their_doors(name):
    def may_enter(module: str) -> bool:
        room, home = room_of(module), room_of(name)
        return room in ("", module, home) or home.startswith(f"{room}.")

    past = {module for module in imported_modules(name, MODULES[name]) if not may_enter(module)}
    assert past == set(), "import these names from the room's __init__ instead"


def test_no_two_files_import_each_other():
    """Not even lazily or for type checkers: every circle of any length."""
    graph = {name: imported_modules(name, tree) for name, tree in MODULES.items()}
    left = {name for name in graph if name not in ROOMS}  # a door imports all that it offers
    while True:
        free = {name for name in left if not graph[name] & left}
        if not free:
            break
        left -= free
    assert left == set(), "these import each other in circles, or what does"


def definitions(kinds: tuple[type, ...]) -> dict[str, list[str]]:
    """Where each name is defined, over all sources."""
    found = defaultdict(list)
    for module, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, kinds):
                found[node.name].append(f"{module}:{node.lineno}")
    return found


FUNCTIONS = definitions((ast.FunctionDef, ast.AsyncFunctionDef))
CLASSES = definitions((ast.ClassDef,))


def test_a_class_name_means_one_thing():
    assert {name: where for name, where in CLASSES.items() if len(where) > 1} == {}


BANNED = {
    *("told", "said", "shown", "asked", "given", "heard", "unheard", "meant", "parcel", "crop"),
    *("harvest", "misfits", "unasked", "ungraded", "machinery", "glance", "carried", "trouble"),
}


def test_no_name_is_a_word_that_cannot_be_guessed():
    names = {**FUNCTIONS, **CLASSES}
    found = {name: names[name] for name in names if name.strip("_").lower() in BANNED}
    assert found == {}


def test_functions_have_a_verb_and_an_object():
    """One word seldom says what is done to what: peers have 12 to 35 % of such names."""
    own = Counter(
        "_" in name.strip("_")
        for name, where in FUNCTIONS.items()
        for _ in where
        if not name.startswith("__")
    )
    assert own[False] / own.total() < 0.35
