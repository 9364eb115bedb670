"""What servers answered to rewards: kept with a run, so that nobody is asked the same twice."""

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # who declares a reward does not pay for what asks a server
    import asyncio
    import sqlite3

Answer = Mapping[str, Any]
"""Plain JSON values. `cost`, if there is one, is what the answer cost, in any currency."""

_TABLE = "CREATE TABLE IF NOT EXISTS answers (request TEXT PRIMARY KEY, answer TEXT NOT NULL)"
_BUSY_SECONDS = 60.0


class AnswerFile:
    """Answers by the content of their requests, in a SQLite file; the other files of its folder
    are read as well."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        others = sorted({*path.parent.glob(f"*{path.suffix}")} - {path})
        self._files = [self._open(each) for each in (path, *others)]

    def _open(self, path: Path) -> "sqlite3.Connection":
        import sqlite3

        connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None)
        connection.execute("PRAGMA synchronous = OFF")  # a killed process loses nothing by it
        connection.execute(_TABLE)
        return connection

    def find(self, request: str) -> Answer | None:
        for file in self._files:
            row = file.execute("SELECT answer FROM answers WHERE request = ?", (request,))
            if (found := row.fetchone()) is not None:
                answer: Answer = json.loads(found[0])
                return answer
        return None

    def keep(self, request: str, answer: Answer) -> None:
        self._files[0].execute(
            "INSERT OR IGNORE INTO answers VALUES (?, ?)", (request, json.dumps(answer))
        )

    def close(self) -> None:
        for file in self._files:
            file.close()


def sum_costs(folder: Path) -> float:
    """Returns what all answers in the files of a folder cost."""
    import sqlite3

    total = 0.0
    for path in sorted(folder.glob("*.db")):
        with closing(sqlite3.connect(path, timeout=_BUSY_SECONDS)) as file:
            (cost,) = file.execute(
                "SELECT total(json_extract(answer, '$.cost')) FROM answers"
            ).fetchone()
            total += cost
    return total


_path: Path | None = None
_file: AnswerFile | None = None


def keep_answers_in(path: Path | None) -> None:
    """Sets the file of this process, made when something is recalled; None keeps nothing."""
    global _path, _file
    if path != _path and _file is not None:
        _file.close()
        _file = None
    _path = path


def _open_answer_file() -> AnswerFile | None:
    global _file
    if _file is None and _path is not None:
        _file = AnswerFile(_path)
    return _file


@dataclass(slots=True)
class _Question:
    answer: "asyncio.Future[Answer]"
    waiting: int = 0


_under_way: dict[tuple[int, str], _Question] = {}
"""By event loop and digest."""


async def recall(request: Mapping[str, Any], ask: Callable[[], Awaitable[Answer]]) -> Answer:
    """Returns what was answered to this request in this run, or asks and keeps the answer.

    Calls with the same request at the same time ask once.

    Args:
        request: plain JSON values that say everything on which the answer depends.
        ask: returns plain JSON values; what it raises is not kept.
    """
    import asyncio

    async def ask_and_keep() -> Answer:
        answer = await ask()
        if (file := _open_answer_file()) is not None:
            file.keep(digest, answer)
        return answer

    text = json.dumps(request, sort_keys=True, ensure_ascii=True, allow_nan=False)
    digest = hashlib.sha256(text.encode("ascii")).hexdigest()
    file = _open_answer_file()
    if file is not None and (known := file.find(digest)) is not None:
        return known
    key = (id(asyncio.get_running_loop()), digest)
    if key not in _under_way:
        _under_way[key] = _Question(asyncio.ensure_future(ask_and_keep()))
    question = _under_way[key]
    question.waiting += 1
    try:
        return await asyncio.shield(question.answer)
    finally:
        question.waiting -= 1
        if not question.waiting:
            question.answer.cancel()  # without effect if it is there
            _under_way.pop(key, None)
