"""The reward `info`: a number that an environment reports with a turn."""

from typing import Any, ClassVar, Literal

from rlx.plugin import Example, Reward, Sample, Score
from rlx_plugins.examples import build_example


def _build_info_example(name: str, value: float | None, *infos: Any, **options: Any) -> Example:
    options = {"key": "return", **options}
    return build_example(name, value, options=options, info=infos[-1], history=infos[:-1])


class InfoReward(Reward):
    """A number that the environment reports: `{plugin: info, key: return}` is an episode's return.

    As a global reward it reads the last turn of a rollout, or with `at: first` the first. It
    abstains where the environment reports no such number.
    """

    examples: ClassVar[tuple[Example, ...]] = (
        _build_info_example("gold", 1.0, {"return": 0.0}, {"return": 1.0}),
        _build_info_example("none", 0.0, {"return": 0.0}, {"return": 0.0}),
        _build_info_example("first", 0.5, {"return": 0.5}, {"return": 0.0}, at="first"),
        _build_info_example("truth", 1.0, {"optimal": True}, key="optimal"),
        _build_info_example("absent", None, {"reward": 0.0}),
    )

    key: str
    """Name of the number in the environment's `info`; true counts as 1."""
    at: Literal["first", "last"] = "last"
    """The turn of a rollout that is read."""

    def score(self, sample: Sample) -> Score | None:
        infos = (*sample.history, sample.info)
        value = infos[0 if self.at == "first" else -1].get(self.key)
        return Score(float(value)) if isinstance(value, int | float) else None
