"""The click group `rlx`, options that several commands share, and how errors are reported."""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import reduce
from importlib import import_module
from io import StringIO
from typing import Any, TypeVar

import click

import rlx
from rlx.cli.output import print_json, print_report, print_text
from rlx.errors import RlxError
from rlx.home import DEFAULT_REGISTRY
from rlx.text import escape_unprintable, redact_passwords, redact_values, write_text_file

Command = TypeVar("Command", bound=Callable[..., Any])
registry_option = click.option(
    "--registry",
    "url",
    metavar="URL",
    envvar="RLX_REGISTRY",
    default=DEFAULT_REGISTRY,
    help="URL of the registry of runs; by default the one in RLX_HOME.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def add_options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """A decorator that adds options to a command, in this order."""
    return lambda command: reduce(lambda decorated, one: one(decorated), options[::-1], command)


def overrides_option(
    metavar: str = "PATH=VALUE", help: str = "Override a value; can be repeated."
) -> Callable[[Command], Command]:
    return click.option("--set", "overrides", multiple=True, metavar=metavar, help=help)


VERBS = {
    "new": ("new:new", "Write an example experiment."),
    "validate": ("validate:validate", "Report every error in experiment files."),
    "plan": ("plan:plan", "Preview every token's rewards and advantages without a model."),
    "submit": ("submit:submit", "Submit experiments as recorded background runs."),
    "runs": ("runs:runs", "List runs."),
    "status": ("runs:status", "Show how a run is doing, or how it went."),
    "logs": ("runs:logs", "Show or follow a run's log."),
    "samples": ("samples:samples", "Show a step's rollouts, or one row token by token."),
    "compare": ("compare:compare", "Compare recipes over their seeds, or two runs in full."),
    "rescore": ("rescore:rescore", "Recompute stored rewards and advantages with any rules."),
    "eval": ("evaluate:evaluate", "Evaluate a model: accuracy, calibration, use of reasoning."),
    "score": ("score:score", "Score a file of responses with any reward."),
    "stop": ("resume:stop", "Stop a run; its records stay."),
    "resume": ("resume:resume", "Resume a run from its newest checkpoint."),
    "check": ("check:check", "Check this machine, a run's records, or resuming; repair."),
    "rm": ("runs:remove", "Remove runs that have ended, or parts of them."),
    "export": ("export:export", "Write a run's model in the Hugging Face layout."),
    "serve": ("serve:serve", "Serve a model over OpenAI's HTTP interface."),
    "plugins": ("plugins:plugins", "List plugins; show, check or create one."),
    "web": ("web:web", "Serve the dashboard, or MLflow's UI."),
}
"""Of each verb its place in this package, "module:command", and its line in `rlx --help`."""
OTHER_NAMES = {
    "diff": "compare --diff",
    "doctor": "check",
    "evaluate": "eval",
    "kill": "stop",
    "list": "runs",
    "mlflow": "web --mlflow",
    "pictures": "status --pictures",
    "probe": "eval --probe",
    "push": "export --push",
    "run": "submit",
    "schema": "validate --schema",
    "show": "validate --values",
    "sync": "check --repair",
    "train": "submit",
    "verify-resume": "check --kills",
    "worker": "submit --at-once",
}
"""Verbs of earlier versions and of other tools, and what does their work here."""


class LazyGroup(click.Group):
    """A click group that imports a command when it is called, and no command for help and hints."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module, _, attribute = VERBS[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(f"rlx.cli.{module}"), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            from rlx.spec.reading import did_you_mean

            near = OTHER_NAMES.get(args[0]) or did_you_mean(args[0], VERBS)
            hint = f"Did you mean 'rlx {near}'?" if near else f"There are: {', '.join(VERBS)}."
            ctx.fail(f"No verb '{escape_unprintable(args[0])}'. {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, line) for name, (_, line) in VERBS.items()])


@click.group(cls=LazyGroup, name="rlx", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(rlx.__version__, prog_name="rlx", message="%(prog)s %(version)s")
def rlx_command() -> None:
    """Declarative experiments for RL post-training of language models."""


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
    as_json = "--json" in arguments
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
        message = redact_passwords(error.format_message())
        if not (as_json and _print_error_json("usage", message, error.exit_code)):
            shown = StringIO()
            error.show(shown)  # it repeats what the user typed
            print_text(redact_passwords(shown.getvalue()), err=True, nl=False)
        return error.exit_code
    except RlxError as error:
        return _report_fault(error, as_json)
    except Exception as error:  # noqa: BLE001  (last handler; it saves the traceback)
        if interrupts:
            return _report_interrupt()
        from rlx.launch import convert_to_rlx_error  # imported only on failure

        fault = convert_to_rlx_error(error)
        code = _report_bug(error, as_json) if fault is None else _report_fault(fault, as_json)
        try:
            sys.stdout.flush()
        except OSError:
            _abandon_output()
        return code


def _report_interrupt() -> int:
    print_text("interrupted", err=True)
    return 130


def format_error_text(error: RlxError) -> str:
    """The message of an error, with the prefix `error:` if it has none."""
    text = redact_passwords(str(error))
    return text if text.startswith(("error:", "warning:")) else f"error: {text}"


def _report_fault(error: RlxError, as_json: bool) -> int:
    """Reports an error that rlx raised on purpose, or that the machine caused."""
    one = getattr(error, "diagnostic", None)
    found = getattr(error, "diagnostics", one and (one,))
    more = {} if found is None else {"diagnostics": [each.to_json() for each in found]}
    kind = type(error).__name__
    if not (as_json and _print_error_json(kind, str(error), error.exit_code, **more)):
        print_report(format_error_text(error))
        _print_debug_traceback(error)
    return error.exit_code


def _report_bug(error: Exception, as_json: bool) -> int:
    """Reports an unexpected error: one line, and the traceback in a file."""
    from rlx.home import format_path, get_rlx_home

    first = f"{type(error).__name__}: {error}".splitlines()[0]
    line = escape_unprintable(redact_passwords(first))
    kept = get_rlx_home() / "last-error.txt"
    report = redact_passwords("".join(traceback.format_exception(error)))
    where = f"the traceback is in {format_path(kept)}"
    try:
        write_text_file(kept, report)
    except RlxError as trouble:
        where = f"the traceback could not be saved: {trouble}; try RLX_DEBUG=1"
    if not (as_json and _print_error_json("bug", line, 1, traceback=str(kept))):
        print_text(f"unexpected error, perhaps a bug in rlx: {line}\n  {where}", err=True)
        _print_debug_traceback(error)
    return 1


def _print_error_json(kind: str, message: str, exit_code: int, **more: Any) -> bool:
    """Prints an error as JSON; returns False if stdout cannot be written."""
    fields = {"kind": kind, "message": message, "exit_code": exit_code, **more}
    with suppress(OSError):
        print_json({"error": redact_values(fields)})
        return True
    return False


def _print_debug_traceback(error: Exception) -> None:
    if os.environ.get("RLX_DEBUG") == "1":
        text = redact_passwords("".join(traceback.format_exception(error)))
        print_text(text, err=True, nl=False)


def _abandon_output() -> None:
    """Redirects stdout to /dev/null, so that the interpreter's flush at exit cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
