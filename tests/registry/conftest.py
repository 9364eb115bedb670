"""Databases for registries."""

from databases import blank, postgres, template, url

__all__ = ["blank", "postgres", "template", "url"]
