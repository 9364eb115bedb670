"""The click group `rlx`: commands with a line of help, imported only when they are called."""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

import click

import rlx

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
    "eval": ("evaluate:evaluate", "Evaluate a model: accuracy and calibration, with intervals."),
    "probe": ("evaluate:probe", "Measure how much a model's answers depend on its reasoning."),
    "score": ("score:score", "Score a file of responses with any reward."),
    "stop": ("resume:stop", "Stop a run; its records stay."),
    "resume": ("resume:resume", "Resume a run from its newest checkpoint; run what is queued."),
    "check": ("check:check", "Check this machine, a run's records, or resuming; repair."),
    "rm": ("runs:remove", "Remove runs that have ended, or parts of them."),
    "export": ("export:export", "Write a run's model in the Hugging Face layout."),
    "plugins": ("plugins.verbs:plugins", "List plugins; show, check or create one."),
    "web": ("web:web", "Serve the dashboard, or MLflow's UI."),
}
"""Of each verb its place in this package, "module:command", and its line in `rlx --help`."""

FORMER_VERBS = {
    "diff": "compare --diff",
    "doctor": "check",
    "mlflow": "web --mlflow",
    "pictures": "status --pictures",
    "schema": "validate --schema",
    "show": "validate --values",
    "sync": "check --repair",
    "verify-resume": "check --kills",
    "worker": "resume --queued",
}
"""Verbs of earlier versions, and what does their work now."""

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
    former_verbs: Mapping[str, str] = MappingProxyType({})
    """Words that were verbs, and what replaces them."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        verbs = self.list_commands(ctx)
        if args and args[0] in self.former_verbs:
            ctx.fail(f"`rlx {args[0]}` is now `rlx {self.former_verbs[args[0]]}`")
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

    other_words, former_verbs = OTHER_WORDS, FORMER_VERBS

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module, _, attribute = VERBS[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(f"rlx.cli.{module}"), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, line) for name, (_, line) in VERBS.items()])


@click.group(cls=LazyGroup, name="rlx", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(rlx.__version__, prog_name="rlx", message="%(prog)s %(version)s")
def rlx_command() -> None:
    """Declarative experiments for RL post-training of language models."""
