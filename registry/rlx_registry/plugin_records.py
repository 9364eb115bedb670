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
    """Returns the names of plugins whose version, source or data differ, in the order of `now`;
    data of which one of the two has no digest are not compared."""
    changed = []
    for kind, name in dict.fromkeys(
        (record.get("kind"), record["name"]) for record in (*now, *then)
    ):
        ours, theirs = (
            [record for record in side if (record.get("kind"), record["name"]) == (kind, name)]
            for side in (now, then)
        )
        if (
            len(ours) != len(theirs)
            or not all(_is_among(one, theirs) for one in ours)
            or not all(_is_among(one, ours) for one in theirs)
        ):
            changed.append(name)
    return list(dict.fromkeys(changed))


def _is_among(one: RecordedPlugin, others: Sequence[RecordedPlugin]) -> bool:
    """Whether a record is the same as another; one with data first of all as another with data."""
    with_data = [other for other in others if other.get("data")] if one.get("data") else []
    return any(
        all(one.get(key) == other.get(key) for key in _CODE)
        and (not one.get("data") or not other.get("data") or one["data"] == other["data"])
        for other in with_data or others
    )


def fill_plugin_options(
    spec: Mapping[str, Any], plugins: Sequence[RecordedPlugin]
) -> dict[str, Any]:
    """Returns a resolved spec with the options that its plugins had, defaults included.

    Args:
        plugins: the records of its plugins, in the order of the spec.
    """
    tree, unused = deepcopy(dict(spec)), list(plugins)
    for kind, key, node in _list_plugin_nodes(tree):
        own = [p for p in unused if (p.get("kind"), p["name"]) == (kind, node.get(key))]
        fits = [
            record
            for record in own
            if all(
                node[name] == value
                for name, value in (record.get("options") or {}).items()
                if name in node and not isinstance(node[name], Mapping)
            )
        ]
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


def _fill_missing(node: dict[str, Any], options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if isinstance(value, Mapping) and isinstance(node.get(name), dict):
            _fill_missing(node[name], value)
        else:
            node.setdefault(name, deepcopy(value))
