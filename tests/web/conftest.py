"""Registries that the dashboard is asked about in this process."""

from registries import empty, filled, known, plain, registry, url

__all__ = ["empty", "filled", "known", "plain", "registry", "url"]
