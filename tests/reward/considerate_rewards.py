"""Rewards that look around. A module of its own, so that worker processes can import it."""

from rlx.plugin import Score, reward


@reward
def found_something(sample):
    """1 when the environment answered this turn's query, and nothing like it was asked before."""
    if sample.info["status"] != "ok":
        return Score(0.0, sample.info["status"])
    return float(sample.info["rows"] > 0)


@reward(scope="siblings")
def nearest_to_mean(samples):
    """1 for each of the siblings that lies nearest to the mean of their numbers."""
    numbers = [float(sample.response) for sample in samples]
    far = [abs(n - sum(numbers) / len(numbers)) for n in numbers]
    return [float(d == min(far)) for d in far]


@reward(scope="group")
def novelty(samples):
    """Share of the group's other responses that differ; abstains alone."""
    if len(samples) == 1:
        return [None]
    said = [sample.response for sample in samples]
    return [(len(said) - said.count(text)) / (len(said) - 1) for text in said]
