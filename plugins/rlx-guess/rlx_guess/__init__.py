"""A number-guessing game for rlx: a task, its environment and two rewards."""
