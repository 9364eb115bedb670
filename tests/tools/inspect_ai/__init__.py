"""Stands in for Inspect: what rlx's metric imports, and `python -m inspect_ai eval`."""
