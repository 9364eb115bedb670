"""The `rlx plugins` commands: list, show, check and create plugins.

Reads the entry points of installed distributions, or a folder or wheel that is not installed.
Prints tables, a page per plugin and the results of conformance checks; writes new distributions.
"""
