"""Writes records of worked examples; imported by the scripts that run in a peer's environment.

They take two arguments: the folder of the peer's sources, and the file to write.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

__all__ = ["Records"]


class Records:
    """Collects records and writes them as JSON.

    Args:
        source: where the outputs come from.
        tolerances: of the file, for peers that compute in float32.
    """

    def __init__(self, source: str, **tolerances: float) -> None:
        self.random = random.Random(0)
        self._head = {"source": source, **tolerances}
        self._examples: list[dict[str, Any]] = []
        self._differences: list[dict[str, Any]] = []
        self._lists: dict[str, list[Any]] = {}

    def add(
        self,
        function: str,
        inputs: dict[str, Any],
        outputs: dict[str, Any],
        options: dict[str, Any] | None = None,
        *,
        title: str = "",
        differs: str = "",
    ) -> None:
        """Adds a record. `differs` says why rlx gives something else on purpose."""
        into = self._differences if differs else self._examples
        record = {"id": f"{'difference ' if differs else ''}{len(into) + 1}", "function": function}
        record |= {"title": title or differs, "inputs": inputs, "options": options or {}}
        into.append({**record, "outputs": outputs})

    def note(self, name: str, entry: Any) -> None:
        """Adds an entry to another list of the file."""
        self._lists.setdefault(name, []).append(entry)

    def write(self) -> None:
        """Writes the file that the command line names, one record per line."""
        lists = {"examples": self._examples, "differences": self._differences, **self._lists}
        parts = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in self._head.items()]
        for name, entries in lists.items():
            lines = ",\n".join(f"  {json.dumps(entry, ensure_ascii=False)}" for entry in entries)
            parts.append(f"{json.dumps(name)}: [\n{lines}\n]" if entries else f'"{name}": []')
        Path(sys.argv[2]).write_text("{" + ",\n".join(parts) + "}\n", encoding="utf-8")
