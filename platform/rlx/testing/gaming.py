"""The check that a reward pays only for solutions, by the searches of `adversary`."""

from typing import Any
from unittest import SkipTest

from rlx.testing.adversary import AdversarialReport, Find, search_adversarial_texts

__all__ = ["report_adversarial_texts"]

_LONGEST_TEXT = 72
_MOST_ROWS = 5


def report_adversarial_texts(reward: Any) -> list[str]:
    """Searches for texts that a reward pays without being solutions, and returns a table of them.

    A text that is paid is a finding for the author to judge: a reward for a form pays every text of
    that form.

    Raises:
        AssertionError: the reward failed on a text, left its `value_range`, or paid as much as for
            a solution for a text that its own `is_solution` denies.
        unittest.SkipTest: the reward's examples do not suffice for a search.
    """
    report = search_adversarial_texts(reward)
    if report is None:
        raise SkipTest(
            "nothing to search with: give it examples of different problems, or `is_solution`"
        )
    for text, fault in report.faults:
        raise AssertionError(f"on {_quote_text(text)}: {fault}")
    for find in report.outside:
        raise AssertionError(
            f"{_quote_text(find.text)} earns {find.score:.6g}, outside its value_range"
        )
    full = report.paid_in_full
    if report.judged and full is not None:
        raise AssertionError(
            f"{_quote_text(full.text)} earns {full.score:.6g} on {dict(full.sample.problem)}, and "
            f"is no solution (found by: {full.origin})"
        )
    return _format_findings(report)


def _format_findings(report: AdversarialReport) -> list[str]:
    """A table of the finds below a line that says what was searched."""
    what = "no solution" if report.judged else f"paid on each of {report.problems} problems"
    if not report.judged and report.problems == 1:
        what = "paid without a problem"
    head = f"{report.calls} calls; a solution earns {report.full:.6g}; {what}:"
    if not report.finds:
        searched = f"{report.calls} calls; a solution earns {report.full:.6g}"
        return [f"{searched}; no other text found that earns more than the minimum"]
    if not report.judged and not report.reads_problem:
        head = f"{head[:-1]} (no value depended on the problem):"
    shortest: dict[str, Find] = {}
    for find in report.finds:
        shortest.setdefault(f"{find.score:.4g}", find)
    rows = [_format_find(find) for find in [*shortest.values()][:_MOST_ROWS]]
    return [head, f"{'SCORE':>8}  {'FOUND BY':26}  TEXT", *rows]


def _format_find(find: Find) -> str:
    return f"{find.score:8.4g}  {find.origin:26}  {_quote_text(find.text)}"


def _quote_text(text: str) -> str:
    quoted = ascii(text)
    return quoted if len(quoted) <= _LONGEST_TEXT else f"{quoted[: _LONGEST_TEXT - 1]}…"
