"""Estimators, masks and placements by their YAML names, with their options, as a run has them."""

from rlx.discovery import bind_implementation, load_plugin


def estimator(name, **options):
    """From `CreditInputs` to advantages."""
    return bind_implementation(load_plugin("estimator", name)(**options))


def mask(name, **options):
    """From a batch to its loss mask."""
    return bind_implementation(load_plugin("mask", name)(**options))


def placement(name, **options):
    """A placement of rewards on tokens."""
    return load_plugin("placement", name)(**options)
