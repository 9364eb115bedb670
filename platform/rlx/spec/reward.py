"""What an experiment may say about rewards: which plugins, on which turns, with which weight."""

from typing import Any, Literal

from pydantic import ConfigDict, Field

from rlx.spec.base import StrictModel

__all__ = [
    "EVERY_TURN",
    "GlobalReward",
    "OnError",
    "PluginUse",
    "RewardsSpec",
    "TurnReward",
    "ValueOnError",
]

EVERY_TURN = "*"
"""As `turn` of a reward: every turn, whatever it is."""


class ValueOnError(StrictModel):
    """Take this number where a scorer failed."""

    value: float


OnError = Literal["fail", "drop_sample", "drop_group"] | ValueOnError


class PluginUse(StrictModel):
    """A plugin by name; every key that is not listed here is one of the plugin's own options."""

    model_config = ConfigDict(extra="allow")

    plugin: str

    @property
    def options(self) -> dict[str, Any]:
        """The plugin's own options, not yet checked against it."""
        return dict(self.__pydantic_extra__ or {})


class _Reward(PluginUse):
    weight: float = 1.0
    on_error: OnError = "fail"
    """What becomes of a sample whose scorer raised, hung, crashed or gave no finite number."""
    deadline: float = Field(5.0, gt=0)
    """Seconds that one call may take."""
    of: str | None = None
    """Another reward: this one reads its raw value, for the same turn or the nearest earlier one of
    its kind."""
    requires: str | None = None
    """Another reward, found as `of` is: where its raw value is not above 0, this one is 0."""


class TurnReward(_Reward):
    """A reward for every turn of one kind."""

    turn: str
    """What the turn is, such as `answer`; "*" stands for every turn of a rollout."""

    def fits(self, kind: str) -> bool:
        """Whether it is for turns of this kind."""
        return self.turn in (kind, EVERY_TURN)


class GlobalReward(_Reward):
    """A reward for a whole rollout: for every row that continues a prompt, judged at its end."""


class RewardsSpec(StrictModel):
    """Named rewards. Names that begin with `_` are scored and stored but never summed."""

    model_config = ConfigDict(populate_by_name=True)

    turn: dict[str, TurnReward] = Field(default_factory=dict)
    global_: dict[str, GlobalReward] = Field(default_factory=dict, alias="global")
