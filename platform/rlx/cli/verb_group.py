"""The click group `rlx`: commands with a line of help, imported only when they are called."""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

import click

import rlx

__all__ = ["VERBS", "LazyGroup", "SuggestingGroup", "Verb", "rlx_command"]


class Verb(NamedTuple):
    """Location of a command, "module:command", and its line in `rlx --help`."""

    target: str
    help: str


VERBS = {
    "submit": Verb("rlx.cli.submit:submit", "Submit experiments as recorded background runs."),
    "new": Verb("rlx.cli.new:new", "Write an example experiment."),
    "validate": Verb("rlx.cli.validate:validate", "Report every error in experiment files."),
    "show": Verb("rlx.cli.show:show", "Show an experiment in full, each value with its origin."),
    "plan": Verb(
        "rlx.cli.plan:plan", "Preview every token's rewards and advantages without a model."
    ),
    "score": Verb("rlx.cli.score:score", "Score a file of responses with any reward."),
    "probe": Verb(
        "rlx.cli.probe:probe", "Measure how much a model's answers depend on its reasoning."
    ),
    "eval": Verb(
        "rlx.cli.evaluate:evaluate", "Evaluate a model: accuracy and calibration, with intervals."
    ),
    "schema": Verb("rlx.cli.validate:schema", "Write the JSON Schema of experiments, for editors."),
    "plugins": Verb("rlx.cli.plugins.verbs:plugins", "List plugins; show, check or create one."),
    "doctor": Verb("rlx.cli.doctor:doctor", "Show what this machine has and lacks."),
    "runs": Verb("rlx.cli.inspect_runs:runs", "List runs."),
    "status": Verb("rlx.cli.inspect_runs:status", "Show the status of a run."),
    "logs": Verb("rlx.cli.inspect_runs:logs", "Show or follow a run's log."),
    "samples": Verb("rlx.cli.samples:samples", "Show rollouts with their rewards."),
    "pictures": Verb("rlx.cli.pictures:pictures", "Draw plots of runs."),
    "check": Verb("rlx.cli.check:check", "Check that a run's stored rollouts are consistent."),
    "rescore": Verb(
        "rlx.cli.rescore:rescore", "Recompute stored rewards and advantages with any rules."
    ),
    "compare": Verb("rlx.cli.compare:compare", "Compare recipes over their seeds."),
    "diff": Verb("rlx.cli.diff:diff", "Show how two runs or experiments differ."),
    "stop": Verb("rlx.cli.submit:stop", "Stop a run; its records stay."),
    "worker": Verb("rlx.cli.worker:worker", "Run queued runs; take over lost runs."),
    "resume": Verb("rlx.cli.resume:resume", "Resume a run from its newest checkpoint."),
    "verify-resume": Verb(
        "rlx.cli.verify_resume:verify_resume",
        "Kill runs and check that they end with the same numbers.",
    ),
    "rm": Verb("rlx.cli.remove:remove", "Remove runs that have ended, or parts of them."),
    "export": Verb(
        "rlx.cli.export_model:export", "Write a run's model in the Hugging Face layout."
    ),
    "sync": Verb("rlx.cli.sync:sync", "Send MLflow the records that it missed."),
    "mlflow": Verb("rlx.cli.web:mlflow", "Serve the MLflow UI with the mirrored runs."),
    "web": Verb("rlx.cli.web:web", "Serve the dashboard."),
}


OTHER_WORDS = {
    "evaluate": "eval",
    "follow": "logs -f",
    "kill": "stop",
    "list": "runs",
    "run": "submit",
    "train": "submit",
}
"""What verbs of rlx are called elsewhere."""


class SuggestingGroup(click.Group):
    """A click group that suggests the nearest verb for an unknown one."""

    other_words: Mapping[str, str] = MappingProxyType({})
    """Words that are no verbs, and the verb that is meant."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        verbs = self.list_commands(ctx)
        if args and args[0] not in verbs and not args[0].startswith("-"):
            from rlx.spec.reading import did_you_mean
            from rlx.text import escape_unprintable

            near = did_you_mean(args[0], [*verbs, *self.other_words])
            hint = f" There are: {', '.join(verbs)}."
            if near:
                hint = f" Did you mean '{self.other_words.get(near, near)}'?"
            ctx.fail(f"No verb '{escape_unprintable(args[0])}'.{hint}")
        return super().resolve_command(ctx, args)


class LazyGroup(SuggestingGroup):
    """A click group whose help and suggestions import no command."""

    other_words = OTHER_WORDS

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module, _, attribute = VERBS[cmd_name].target.partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, verb.help) for name, verb in VERBS.items()])


_SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"]}


@click.group(cls=LazyGroup, name="rlx", context_settings=_SETTINGS)
@click.version_option(rlx.__version__, prog_name="rlx", message="%(prog)s %(version)s")
def rlx_command() -> None:
    """Declarative experiments for RL post-training of language models."""
