"""A shop's stock in SQLite: a database that the policy reads and writes, and a task for it."""

import hashlib
import random
import shutil
import sqlite3
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rlx.plugin import (
    Action,
    Demonstration,
    Episode,
    Plugin,
    Problem,
    Reply,
    Split,
    StatefulEnvironment,
    get_last_block,
)

ITEMS = ("figs", "pears", "plums", "limes", "dates", "beans")
_ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_UPDATE}
_MOST_STEPS = 10_000
_READ = "select n from stock where item='{}'"
_WRITE = "update stock set n={} where item='{}'"


@dataclass(slots=True)
class Session:
    """A connection to a database file of its own, and the counts that are wanted in the end."""

    folder: str
    connection: sqlite3.Connection
    wanted: Mapping[str, int]

    @property
    def is_right(self) -> bool:
        """Whether the database holds what is wanted, and nothing else has changed."""
        return dict(self.connection.execute("select item, n from stock")) == self.wanted


class Stock(StatefulEnvironment):
    """Executes the SQL of a turn; a turn that writes is the last.

    As in any database, a turn that is played twice writes twice, so that nothing is replayed.
    """

    kinds: ClassVar[tuple[str, ...]] = ("read", "write", "refused")
    replayable: ClassVar[bool] = False
    examples: ClassVar[tuple[Episode, ...]] = (
        Episode(
            name="gold",
            problem={"stock": {"figs": 4, "pears": 5}, "item": "pears", "more": 3},
            turns=("<sql>select n from stock</sql>", "<sql>update stock set n=8 where n=5</sql>"),
            kinds=("read", "write"),
            observations=("4 5\n", ""),
        ),
        Episode(
            name="hostile",
            problem={"stock": {"figs": 4}, "item": "figs", "more": 3},
            turns=("<sql>attach 'a' as b</sql>", "<sql>select '<sql>'</sql>", "<sql>\0</sql>"),
            kinds=("refused", "read", "refused"),
            observations=("SQLITE_AUTH\n", "(sql>\n", "no SQL\n"),
            done=False,
        ),
    )

    def open(self, problem: Mapping[str, Any], seed: int) -> Session:
        """Writes the stock of a problem to a new file."""
        folder = tempfile.mkdtemp(prefix="rlx-stock-")
        connection = sqlite3.connect(Path(folder) / "stock.db", isolation_level=None)
        connection.execute("create table stock (item text, n integer) strict")
        connection.executemany("insert into stock values (?, ?)", problem["stock"].items())
        connection.set_authorizer(_authorize)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1000)
        connection.set_progress_handler(lambda: 1, _MOST_STEPS)
        item = problem["item"]
        wanted = {**problem["stock"], item: problem["stock"][item] + problem["more"]}
        return Session(folder, connection, wanted)

    def play(self, game: Session, action: Action) -> Reply:
        """Executes a statement."""
        before = game.connection.total_changes
        kind, answer = _execute(
            game.connection, get_last_block(action.text, "<sql>", "</sql>") or ""
        )
        if game.connection.total_changes > before:
            kind, answer = "write", ""
        return Reply(
            kind=kind,
            observation=f"{answer}\n" if answer else "",
            done=kind == "write",
            info={"right": game.is_right},
        )

    def close(self, game: Session) -> None:
        """Deletes the file."""
        game.connection.close()
        shutil.rmtree(game.folder)


def _authorize(action: int, table: str | None, column: str | None, *_: Any) -> int:
    """Lets statements read, and change numbers: no other files, functions or recursion."""
    may = action in _ALLOWED and (action != sqlite3.SQLITE_UPDATE or column == "n")
    return sqlite3.SQLITE_OK if may else sqlite3.SQLITE_DENY


def _execute(connection: sqlite3.Connection, statement: str) -> tuple[str, str]:
    """The kind of a turn, and the first values or the name of the error."""
    if not statement.strip() or "\0" in statement:
        return "refused", "no SQL"
    try:
        rows = connection.execute(statement).fetchmany(len(ITEMS))
    except sqlite3.Error as error:
        return "refused", getattr(error, "sqlite_errorname", "SQLITE_MISUSE")
    except ValueError:  # what is no Unicode
        return "refused", "no SQL"
    values = " ".join(str(value)[:20] for row in rows for value in row[:2])
    return "read", values.replace("<", "(") or "nothing"


class StockTask(Plugin):
    """Says how many more of an item have come. Train and test have other counts of an item."""

    care: float = 0.6
    """Share of the warm start's statements that are right."""

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        """Returns problem number `index`; the same for the same arguments."""
        rng = random.Random(f"stock/{seed}/{split}/{index}")
        while True:
            item, more, count = rng.choice(ITEMS), rng.randint(1, 9), rng.randint(1, 9)
            name = f"stock/{more} more {item} beside {count}"
            tested = hashlib.sha256(name.encode()).digest()[0] % 5 == 0
            if tested == (split == "test"):
                break
        others = random.Random(f"{seed}/{name}")
        stock = {each: others.randint(1, 9) for each in sorted(others.sample(ITEMS, 2))}
        stock[item] = count
        fields = {"stock": stock, "item": item, "more": more, "data_source": "stock"}
        return Problem(id=name, prompt=f"{more} more {item}\n", fields=fields)

    def lesson(self, index: int, seed: int) -> Problem:
        """Returns problem number `index` of the warm start."""
        return self.problem("train", index, seed)

    def demonstration(self, problem: Problem, seed: int) -> Demonstration:
        """Returns the turns of a right episode, for schedules without an environment."""
        item, more = problem.fields["item"], problem.fields["more"]
        count = problem.fields["stock"][item] + more
        statements = (_READ.format(item), _WRITE.format(count, item))
        return Demonstration(tuple(f"<sql>{each}</sql>" for each in statements))

    def act(
        self, problem: Problem, turns: Sequence[str], observations: Sequence[str], seed: int
    ) -> str:
        """Reads the number, adds and writes; often with a mistake."""
        rng = random.Random(f"stock/act/{seed}/{len(turns)}")
        is_right = rng.random() < self.care
        item = problem.fields["item"] if is_right else rng.choice(ITEMS)
        if not turns:
            return f"<sql>{_READ.format(item)}</sql>"
        known = observations[-1].strip()
        count = int(known) if known.isdecimal() else rng.randint(1, 9)
        count += problem.fields["more"] if is_right else rng.randint(1, 9)
        return f"<sql>{_WRITE.format(count, problem.fields['item'])}</sql>"
