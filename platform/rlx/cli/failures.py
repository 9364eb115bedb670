"""Reports the failure of a command: message, output stream and exit code."""

import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from io import StringIO
from itertools import pairwise
from typing import Any

import click

from rlx.cli.output import print_json, print_report, print_text
from rlx.errors import RlxError
from rlx.text import escape_unprintable, redact_passwords, redact_values


def run_guarded(
    command: click.Command, arguments: Sequence[str], interrupts: Sequence[int] = ()
) -> int:
    """Runs a click command and returns its exit code, also when it raises.

    Args:
        command: returns None or an exit code.
        arguments: without the program name. If they ask for JSON, failures are JSON on stdout:
            `{"error": {"kind", "message", "exit_code", ...}}`.
        interrupts: not empty once an interrupt came, which an error may be the result of.
    """
    as_json = _wants_json(arguments)
    try:
        result = command.main(list(arguments), prog_name="rlx", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except (click.exceptions.Abort, KeyboardInterrupt):
        return report_interrupt()
    except BrokenPipeError:
        _abandon_output()  # the reader of the pipe has exited, which is no failure
        return 0
    except click.ClickException as error:
        message = redact_passwords(error.format_message())
        usage = {"kind": "usage", "message": message, "exit_code": error.exit_code}
        if not (as_json and _print_json({"error": usage})):
            shown = StringIO()
            error.show(shown)  # it repeats what the user typed
            print_text(redact_passwords(shown.getvalue()), err=True, nl=False)
        return error.exit_code
    except RlxError as error:
        return _report_fault(error, as_json)
    except Exception as error:  # noqa: BLE001  (last handler; it saves the traceback)
        if interrupts:
            return report_interrupt()
        from rlx.launch import convert_to_rlx_error  # imported only on failure

        fault = convert_to_rlx_error(error)
        code = _report_bug(error, as_json) if fault is None else _report_fault(fault, as_json)
        try:
            sys.stdout.flush()
        except OSError:
            _abandon_output()
        return code


def report_interrupt() -> int:
    """Says that the command was interrupted; returns its exit code."""
    print_text("interrupted", err=True)
    return 130


def build_error_json(error: RlxError) -> dict[str, Any]:
    """Returns an error as the JSON object that commands print with `--json`."""
    fields: dict[str, Any] = {
        "kind": type(error).__name__,
        "message": str(error),
        "exit_code": error.exit_code,
    }
    diagnostics = getattr(error, "diagnostics", None)
    if diagnostics is None and (one := getattr(error, "diagnostic", None)) is not None:
        diagnostics = (one,)
    if diagnostics is not None:
        fields["diagnostics"] = [found.to_json() for found in diagnostics]
    return {"error": redact_values(fields)}


def format_error_text(error: RlxError) -> str:
    """Returns the message of an error, with the prefix `error:` if it has none."""
    text = redact_passwords(str(error))
    return text if text.startswith(("error:", "warning:")) else f"error: {text}"


def _report_fault(error: RlxError, as_json: bool) -> int:
    """Reports an error that rlx raised on purpose, or that the machine caused."""
    if not (as_json and _print_json(build_error_json(error))):
        print_report(format_error_text(error))
        _print_debug_traceback(error)
    return error.exit_code


def _report_bug(error: Exception, as_json: bool) -> int:
    """Reports an unexpected error: one line, and the traceback in a file."""
    from rlx.home import format_path, get_rlx_home

    first = f"{type(error).__name__}: {error}".splitlines()[0]
    line = escape_unprintable(redact_passwords(first))
    kept = get_rlx_home() / "last-error.txt"
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        report = redact_passwords("".join(traceback.format_exception(error)))
        kept.write_text(report, encoding="utf-8")
        where = f"the traceback is in {format_path(kept)}"
    except OSError as trouble:
        why = f"{format_path(kept)}: {trouble.strerror}"
        where = f"the traceback could not be saved to {why}; try RLX_DEBUG=1"
    bug = {"kind": "bug", "message": line, "exit_code": 1, "traceback": str(kept)}
    if not (as_json and _print_json({"error": bug})):
        print_text(f"unexpected error, perhaps a bug in rlx: {line}\n  {where}", err=True)
        _print_debug_traceback(error)
    return 1


def _wants_json(arguments: Sequence[str]) -> bool:
    flags = {"--json", "--format=json"} & set(arguments)
    return bool(flags) or ("--format", "json") in pairwise(arguments)


def _print_json(value: dict[str, Any]) -> bool:
    """Prints a JSON object; returns False if stdout cannot be written."""
    with suppress(OSError):
        print_json(value)
        return True
    return False


def _print_debug_traceback(error: Exception) -> None:
    if os.environ.get("RLX_DEBUG") == "1":
        text = redact_passwords("".join(traceback.format_exception(error)))
        print_text(text, err=True, nl=False)


def _abandon_output() -> None:
    """Redirects stdout to /dev/null, so that the interpreter's flush at exit cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
