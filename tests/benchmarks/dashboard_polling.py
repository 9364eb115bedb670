"""What open pages of the dashboard cost a run that writes at full speed, and the machine.

    python tests/benchmarks/dashboard_polling.py

Each of 20 clients asks for the news of the run and of all runs every 5 s. Rounds without and with
them take turns.
"""

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import row

sys.path.insert(0, str(Path(__file__).parents[1]))
from dashboards import dashboard
from pollers import METRICS, polling, writing

SECONDS, ROUNDS = 15.0, 4


def dashboard_polling() -> list[dict[str, Any]]:
    """Rows for docs/benchmarks.md; the first round does not count.

    Raises:
        AssertionError: a lock was held against the run, or a client got no answer.
    """
    alone, polled, shares, answers = [], [], [], []
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/registry.db"
        with writing(url, Path(folder) / "run") as writer, dashboard(url) as served:
            for _ in range(ROUNDS + 1):
                alone.append(writer.write(SECONDS))
                before = served.cpu()
                with polling(served, writer.run) as pollers:
                    polled.append(writer.write(SECONDS))
                shares.append(100 * (served.cpu() - before) / SECONDS)
                answers.append(pollers.seconds)
                assert pollers.wrong == [], pollers.wrong
    assert all(stretch.said == "" for stretch in alone + polled)
    alone, polled, shares, answers = alone[1:], polled[1:], shares[1:], answers[1:]

    def write(at: str, milliseconds: Any) -> dict[str, Any]:
        theirs = statistics.median(milliseconds(one.seconds) for one in alone)
        values = [milliseconds(one.seconds) for one in polled]
        return row(f"polling_{at}_write", values, f"without pages, {theirs:.1f} ms", "ms")

    rate = statistics.median(one.steps / SECONDS for one in alone)
    values = [one.steps / SECONDS for one in polled]
    return [
        row("polling_server", shares, "the goal, 10 %", "% of a core"),
        write("middle", lambda seconds: 1e3 * statistics.median(seconds)),
        write("longest", lambda seconds: 1e3 * max(seconds)),
        row(
            "polling_steps",
            values,
            f"without pages, {rate:.1f}",
            f"steps of {METRICS} metrics per second",
        ),
        row(
            "polling_answer",
            [1e3 * statistics.median(one) for one in answers],
            f"none: {len(answers[0])} answers in {SECONDS:g} s",
            "ms",
        ),
    ]


if __name__ == "__main__":
    for figure in dashboard_polling():
        print({key: figure[key] for key in ("name", "ratio", "low", "high", "unit", "baseline")})
