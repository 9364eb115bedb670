"""Checks that an experiment provides what its plugins read: other rewards, and streams."""

from collections.abc import Iterator
from dataclasses import replace

from rlx.discovery import (
    DEMONSTRATIONS,
    NEEDS,
    BuiltPlugins,
    build_plugin_diagnostic,
    find_installed_plugin,
    list_needed_streams,
)
from rlx.spec import EnvironmentRolloutSpec, ExperimentSpec
from rlx.spec.reading import Diagnostic, build_error, format_key_path, suggest_name

__all__ = ["check_needed_streams", "check_parent_rewards"]


def check_parent_rewards(plugins: BuiltPlugins) -> Iterator[Diagnostic]:
    """Reports a missing `of`, or one that the reward does not read."""
    built = plugins.built
    rewards = [place for place in plugins.places if place.path[0] == "rewards"]
    for place in rewards:
        if place.path not in built:
            continue
        label = format_key_path(place.path)
        reads = getattr(built[place.path], "reads_parent", False)
        if reads and place.of is None:
            yield build_error(
                place.path,
                f"{label} needs `of`: {place.name!r} reads the value of another reward",
                f"of: {next((str(u.path[-1]) for u in rewards if u is not place), 'NAME')}",
            )
        if not reads and place.of is not None:
            message = f"{label}.of is {place.of!r}, but {place.name!r} reads no other reward"
            yield build_error(
                (*place.path, "of"),
                message,
                "drop `of`; your own plugin can read it if declared as "
                "`@reward(reads_parent=True)`",
            )


def check_needed_streams(spec: ExperimentSpec, plugins: BuiltPlugins) -> Iterator[Diagnostic]:
    """Reports streams that a plugin or warm start needs and the experiment does not provide."""
    wanted = [
        (place.name_path, place, name)
        for place, plugin in plugins.list_all()
        for name in list_needed_streams(plugin)
    ]
    for path, place, name in wanted:
        if name not in NEEDS:
            help_ = suggest_name(name, NEEDS, f"there are: {', '.join(NEEDS)}")
            what = f"needs '{name}', which is not an rlx stream"
            yield replace(
                build_plugin_diagnostic(
                    find_installed_plugin(place.kind, place.name), what, (help_,)
                ),
                path=path,
            )
    needs = [(path, place.label, name) for path, place, name in wanted if name in NEEDS]
    if spec.model.warm_start is not None:
        rollout = spec.rollout
        several = isinstance(rollout, EnvironmentRolloutSpec) and not rollout.has_one_turn
        wanted_of_task = "lessons" if several else "demonstrations"
        needs.append((("model", "warm_start"), "model.warm_start", wanted_of_task))
    task = plugins.built.get(("task",))
    worked = plugins.built.get(DEMONSTRATIONS, task)
    for path, who, name in needs:
        provider, source = NEEDS[name], worked if path == ("model", "warm_start") else task
        if source is not None and not provider.is_present(spec, source):
            message = (
                f"{who} needs {name}, which {provider.origin} provides: this experiment has none"
            )
            yield build_error(path, message, provider.help)
