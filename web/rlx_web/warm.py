"""What the first view of a page would wait for."""

from importlib import import_module

from rlx_web.text import templates

__all__ = ["warm_up_pages"]

SLOW = ("pyarrow.dataset", "pyarrow.parquet", "scipy.special")
"""What single pages import when they are first asked for; half a second together."""


def warm_up_pages() -> None:
    """Imports and compiles what pages need, so that a server that has just begun is a quick one."""
    for module in SLOW:
        import_module(module)
    for name in templates.env.list_templates():
        templates.env.get_template(name)
