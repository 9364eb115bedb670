"""What runs record of their plugins: which code and data they were, and their options."""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

_CODE = ("distribution", "version", "sha256")

RecordedPlugin = Mapping[str, Any]
"""Name, kind, code, options and data of a plugin."""


def find_changed_plugins(
    now: Sequence[RecordedPlugin], then: Sequence[RecordedPlugin]
) -> list[str]:
    """Returns the names of plugins whose version, source or data differ, in the order of `now`.

    Data of which one of the two has no digest are not compared.
    """
    names = dict.fromkeys((record.get("kind"), record["name"]) for record in (*now, *then))
    return list(
        dict.fromkeys(
            name
            for kind, name in names
            if not _is_same_plugin(
                *(
                    [r for r in side if (r.get("kind"), r["name"]) == (kind, name)]
                    for side in (now, then)
                )
            )
        )
    )


def _is_same_plugin(now: Sequence[RecordedPlugin], then: Sequence[RecordedPlugin]) -> bool:
    return (
        len(now) == len(then)
        and all(_is_among(one, then) for one in now)
        and all(_is_among(one, now) for one in then)
    )


def _is_among(one: RecordedPlugin, others: Sequence[RecordedPlugin]) -> bool:
    """Whether a record is the same as another; one with data first of all as another with data."""
    with_data = [other for other in others if other.get("data")] if one.get("data") else []
    return any(_is_same(one, other) for other in with_data or others)


def _is_same(one: RecordedPlugin, other: RecordedPlugin) -> bool:
    data, others = one.get("data"), other.get("data")
    same_data = not data or not others or data == others
    return same_data and all(one.get(key) == other.get(key) for key in _CODE)


def fill_plugin_options(
    spec: Mapping[str, Any], plugins: Sequence[RecordedPlugin]
) -> dict[str, Any]:
    """Returns a resolved spec with the options that its plugins had, defaults included.

    Args:
        spec: the experiment under its YAML keys.
        plugins: the records of its plugins, in the order of the spec.
    """
    tree, unused = deepcopy(dict(spec)), list(plugins)
    for kind, key, node in _list_plugin_nodes(tree):
        own = [p for p in unused if (p.get("kind"), p["name"]) == (kind, node.get(key))]
        fits = [p for p in own if _contains(p.get("options") or {}, node)]
        if record := next(iter(fits or own), None):
            unused.remove(record)
            _fill_missing(node, record.get("options") or {})
    return tree


def _list_plugin_nodes(tree: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields the kind of each plugin, the key that holds its name, and its mapping in the tree."""
    rewards = tree.get("rewards") or {}
    scopes = [rewards.get(scope) or {} for scope in ("turn", "global")]
    nodes = [
        ("task", "plugin", tree.get("task")),
        ("environment", "plugin", (tree.get("rollout") or {}).get("environment")),
        *(("reward", "plugin", use) for scope in scopes for use in scope.values()),
        ("mask", "strategy", tree.get("mask")),
        ("estimator", "name", tree.get("estimator")),
        ("placement", "plugin", (tree.get("credit") or {}).get("placement")),
    ]
    return ((kind, key, node) for kind, key, node in nodes if isinstance(node, dict))


def _contains(options: Mapping[str, Any], node: Mapping[str, Any]) -> bool:
    return all(node[name] == value for name, value in options.items() if _is_plain(node, name))


def _is_plain(node: Mapping[str, Any], name: str) -> bool:
    return name in node and not isinstance(node[name], Mapping)


def _fill_missing(node: dict[str, Any], options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if isinstance(value, Mapping) and isinstance(node.get(name), dict):
            _fill_missing(node[name], value)
        else:
            node.setdefault(name, deepcopy(value))
