"""`rlx show`: every value of an experiment with its origin."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from rlx.cli.options import overrides_option, registry_option
from rlx.cli.output import print_json, print_text
from rlx.discovery import ExperimentPlugins
from rlx.errors import SpecError
from rlx.launch import RUN_LIKE, open_registry
from rlx.plan import check_file
from rlx.plugin import Plugin
from rlx.spec import PROFILES, ExperimentSpec
from rlx.spec.reading import list_leaf_values

__all__ = ["show"]


@dataclass(frozen=True, slots=True)
class _ShownExperiment:
    """An experiment as it is shown.

    Attributes:
        spec: under its YAML keys, without what plugins filled in.
        values: every value by its dotted path, and `origins` where it comes from.
    """

    spec: dict[str, Any]
    digest: str
    values: dict[str, Any]
    origins: dict[str, str]
    seed: int


@click.command()
@click.argument("experiment", metavar="SPEC|RUN")
@overrides_option("PATH.TO.KEY=VALUE")
@click.option(
    "--json", "as_json", is_flag=True, help="Print the resolved spec, values and origins as JSON."
)
@registry_option
def show(experiment: str, overrides: tuple[str, ...], as_json: bool, url: str) -> None:
    """Show an experiment, or that of a RUN, in full, each value with its origin.

    An origin is a line of the file, `--set`, `default`, `plugin default`, or `profile NAME`;
    `(auto)` follows it where the value there is `auto`, and what it stands for is shown.
    """
    if RUN_LIKE.fullmatch(experiment) and not Path(experiment).exists():
        if overrides:
            raise SpecError("--set changes a file; a run's experiment is as it was")
        shown = _load_run_values(experiment, url)
    else:
        shown = _read_file_values(Path(experiment), overrides)
    if as_json:
        document = {key: value for key, value in asdict(shown).items() if key != "seed"}
        print_json(document)
        return
    order = {key: place for place, key in enumerate(ExperimentSpec.model_fields)}
    values, origins = shown.values, shown.origins
    paths = sorted(values, key=lambda path: order[path.split(".")[0]])
    rows = [(p, json.dumps(values[p], ensure_ascii=False), f"# {origins[p]}") for p in paths]
    from rich.table import Column

    from rlx.cli.console import open_console, print_table

    # Keys and origins stay whole where there is room; the values are what is wrapped.
    room = open_console().width - 4
    key = min(max(map(len, paths)), room * 3 // 5)
    origin = min(max(len(row[2]) for row in rows), (room - key) * 3 // 5)
    print_table(Column(width=key), "", Column(width=origin), rows=rows)
    print_text(f"\nspec {shown.digest}, seed {shown.seed}")


def _read_file_values(path: Path, overrides: Sequence[str]) -> _ShownExperiment:
    read, plugins = check_file(path, overrides)
    tree = read.spec.dump_resolved()
    values, origins = dict(list_leaf_values(tree)), dict(read.origins)
    for at, value in _plugin_defaults(plugins).items():
        if at not in values:
            values[at], origins[at] = value, _describe_default_origin(at, read.spec)
    return _ShownExperiment(
        tree, plugins.compute_digest(read.spec), values, origins, read.spec.seed
    )


def _load_run_values(ref: str, url: str) -> _ShownExperiment:
    with open_registry(url) as registry:
        run = registry.run(ref)
    values, recorded = dict(list_leaf_values(run.settings)), run.origins or {}
    lacking = "plugin default" if recorded else "not recorded"
    origins = {path: recorded.get(path, lacking) for path in values}
    return _ShownExperiment(run.spec, run.digest, values, origins, run.seed)


def _describe_default_origin(path: str, spec: ExperimentSpec) -> str:
    """Returns the origin of a plugin option that the YAML leaves out."""
    section, *_, option = path.split(".")
    profile = spec.credit.profile
    by_profile = section in ("estimator", "mask") and option in PROFILES[profile]
    return f"profile {profile}" if by_profile else "plugin default"


def _plugin_defaults(plugins: ExperimentPlugins) -> dict[str, Any]:
    """Returns every option of every plugin, by its path in YAML."""
    rewards = {f"rewards.{s}.{name}": made for (s, name), made in plugins.rewards.items()}
    places = {"task": plugins.task, **rewards, "mask": plugins.mask, "estimator": plugins.estimator}
    for origin, plugin in zip(plugins.provenance, plugins.named, strict=True):
        if origin.kind == "placement":
            places["credit.placement"] = plugin
    if plugins.environment is not None:
        places["rollout.environment"] = plugins.environment
    return dict(o for place, plugin in places.items() for o in _list_plugin_options(place, plugin))


def _list_plugin_options(place: str, plugin: Plugin) -> Iterator[tuple[str, Any]]:
    """Yields path and value of the options of a plugin and of the plugins nested in it."""
    yield from _flatten_options(plugin.model_dump(mode="json", by_alias=True), f"{place}.")
    for option in plugin.nested:
        for key, held in plugin.inner(option).items():
            yield from _list_plugin_options(f"{place}.{option}.{key}", held)


def _flatten_options(options: dict[str, Any], before: str = "") -> list[tuple[str, Any]]:
    flat = []
    for key, value in options.items():
        path = f"{before}{key}"
        flat += (
            _flatten_options(value, f"{path}.")
            if isinstance(value, dict) and value
            else [(path, value)]
        )
    return flat
