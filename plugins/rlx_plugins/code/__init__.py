"""Rewards that run code of an answer, in a sandbox."""
