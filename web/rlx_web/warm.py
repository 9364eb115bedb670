"""Preloads modules and templates so that the first page view is fast."""

from importlib import import_module

from rlx_web.text import templates

__all__ = ["warm_up_pages"]

SLOW = ("pyarrow.dataset", "pyarrow.parquet", "scipy.special")
"""Modules that single pages import on first use; half a second together."""


def warm_up_pages() -> None:
    """Imports the modules and compiles the templates that pages need."""
    for module in SLOW:
        import_module(module)
    for name in templates.env.list_templates():
        templates.env.get_template(name)
