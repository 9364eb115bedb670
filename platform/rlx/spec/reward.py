"""The `rewards:` section: reward plugins, the turns they score, and their weights."""

from typing import Any, Literal

from pydantic import ConfigDict, Field

from rlx.plugin import StrictModel

EVERY_TURN = "*"
"""Value of a reward's `turn` that matches every kind of turn."""


class ValueOnError(StrictModel):
    """Use this value if the scorer failed."""

    value: float


Over = Literal["path", "below", "prompt"]
OnError = Literal["fail", "drop_sample", "drop_group"] | ValueOnError


class PluginUse(StrictModel):
    """A plugin by name; every key that is not listed here is an option of the plugin."""

    model_config = ConfigDict(extra="allow")

    plugin: str

    @property
    def options(self) -> dict[str, Any]:
        """The plugin's options, not yet validated."""
        return dict(self.__pydantic_extra__ or {})


class _Reward(PluginUse):
    weight: float = 1.0
    on_error: OnError = "fail"
    """What to do with a sample whose scorer raised, hung, crashed or returned no finite number."""
    deadline: float = Field(5.0, gt=0)
    """Time limit of one call, in seconds."""
    of: str | None = None
    """Another reward whose raw value this one reads, from the same turn or the nearest earlier
    turn of its kind."""
    requires: str | None = None
    """Another reward, located like `of`; this reward is 0 unless its raw value is above 0."""


class TurnReward(_Reward):
    """A reward for every turn of one kind."""

    turn: str
    """Kind of turn, such as `answer`; "*" matches every turn of a rollout."""
    over: Over = "path"
    """Turns whose `of` is read. path: this turn, or the nearest earlier one that has it. below: all
    turns below this one that have it, as their mean. prompt: all turns of the prompt that have it,
    as their mean."""

    def fits(self, kind: str) -> bool:
        """Whether the reward scores turns of this kind."""
        return self.turn in (kind, EVERY_TURN)


class GlobalReward(_Reward):
    """A reward for a whole rollout: scored at the end of every row that continues a prompt."""


class RewardsSpec(StrictModel):
    """Named rewards. Rewards whose names begin with `_` are scored and stored but not summed."""

    model_config = ConfigDict(populate_by_name=True)

    turn: dict[str, TurnReward] = Field(default_factory=dict)
    global_: dict[str, GlobalReward] = Field(default_factory=dict, alias="global")

    def list_summed_weights(self) -> list[float]:
        """The weights, other than 0, of the rewards that are summed."""
        rewards = {**self.turn, **self.global_}
        return [one.weight for n, one in rewards.items() if one.weight and not n.startswith("_")]
