"""A server of PostgreSQL."""

from databases import postgres, template

__all__ = ["postgres", "template"]
