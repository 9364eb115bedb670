"""Reports the failure of a command: message, output stream and exit code."""

import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import pairwise
from threading import current_thread, main_thread
from types import FrameType
from typing import Any

import click

from rlx.errors import RlxError

__all__ = ["build_error_json", "format_error_text", "run_guarded"]


def run_guarded(command: click.Command, arguments: Sequence[str]) -> int:
    """Runs a click command and returns its exit code, also when it raises.

    Args:
        command: returns None or an exit code.
        arguments: without the program name. If they ask for JSON, failures are JSON on stdout:
            `{"error": {"kind", "message", "exit_code", ...}}`.
    """
    with _collect_interrupts() as interrupts:
        return _run_click_command(command, arguments, interrupts)


def _run_click_command(
    command: click.Command, arguments: Sequence[str], interrupts: list[int]
) -> int:
    as_json = _wants_json(arguments)
    try:
        result = command.main(list(arguments), prog_name="rlx", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except (click.exceptions.Abort, KeyboardInterrupt):
        return _report_interrupt()
    except BrokenPipeError:
        _abandon_output()  # the reader of the pipe has exited, which is no failure
        return 0
    except click.ClickException as error:
        if as_json:
            _print_json(_build_usage_json(error))
        else:
            error.show()
        return error.exit_code
    except RlxError as error:
        return _report_fault(error, as_json)
    except Exception as error:  # noqa: BLE001  (last handler; it saves the traceback)
        if interrupts:
            return _report_interrupt()
        from rlx.launch import convert_to_rlx_error  # imported only on failure

        fault = convert_to_rlx_error(error)
        code = _report_bug(error, as_json) if fault is None else _report_fault(fault, as_json)
        _flush_or_abandon()
        return code


@contextmanager
def _collect_interrupts() -> Iterator[list[int]]:
    """Collects interrupts: compiled code such as pydantic may turn one into another error."""
    came: list[int] = []

    def record_interrupt(number: int, frame: FrameType | None) -> None:
        came.append(number)
        signal.default_int_handler(number, frame)

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or current_thread() is not main_thread():
        yield came
        return
    signal.signal(signal.SIGINT, record_interrupt)
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)


def _report_interrupt() -> int:
    click.echo("interrupted", err=True)
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
        fields["diagnostics"] = [asdict(d) for d in diagnostics]
    return {"error": fields}


def format_error_text(error: RlxError) -> str:
    """Returns the message of an error, with the prefix `error:` if it has none."""
    text = str(error)
    return text if text.startswith(("error:", "warning:")) else f"error: {text}"


def _report_fault(error: RlxError, as_json: bool) -> int:
    """Reports an error that rlx raised on purpose, or that the machine caused."""
    if not (as_json and _print_json(build_error_json(error))):
        from rlx.cli.text import color_report

        click.echo(color_report(format_error_text(error), sys.stderr), err=True)
        _print_debug_traceback(error)
    return error.exit_code


def _flush_or_abandon() -> None:
    """Flushes stdout; if that fails, keeps the interpreter from trying again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        _abandon_output()


def _abandon_output() -> None:
    """Redirects stdout to /dev/null, so that the interpreter's flush at exit cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _wants_json(arguments: Sequence[str]) -> bool:
    flags = {"--json", "--format=json"} & set(arguments)
    return bool(flags) or ("--format", "json") in pairwise(arguments)


def _build_usage_json(error: click.ClickException) -> dict[str, Any]:
    message = error.format_message()
    return {"error": {"kind": "usage", "message": message, "exit_code": error.exit_code}}


def _print_json(value: dict[str, Any]) -> bool:
    """Prints a JSON object; returns False if stdout cannot be written."""
    with suppress(OSError):
        click.echo(json.dumps(value, indent=2))
        return True
    return False


def _print_debug_traceback(error: Exception) -> None:
    if os.environ.get("RLX_DEBUG") == "1":
        traceback.print_exception(error)


def _report_bug(error: Exception, as_json: bool) -> int:
    """Reports an unexpected error: one line, and the traceback in a file."""
    from rlx.home import format_path, get_rlx_home
    from rlx.text import escape_unprintable

    line = escape_unprintable(f"{type(error).__name__}: {error}".splitlines()[0])
    kept = get_rlx_home() / "last-error.txt"
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        where = f"the traceback is in {format_path(kept)}"
    except OSError as trouble:
        why = f"{format_path(kept)}: {trouble.strerror}"
        where = f"the traceback could not be kept in {why}; try RLX_DEBUG=1"
    if as_json:
        failure = {"kind": "bug", "message": line, "exit_code": 1, "traceback": str(kept)}
        _print_json({"error": failure})
    else:
        click.echo(f"rlx has a bug, or met a surprise: {line}\n  {where}", err=True)
        _print_debug_traceback(error)
    return 1
