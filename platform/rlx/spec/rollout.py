"""The `rollout:` section (entry-point group `rlx.schedules`): the turns of rollout trees."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticKnownError

from rlx.plugin import FAILED, Count, PluginSection, Schedule, StrictModel, TurnLevel
from rlx.plugin import DynamicSampling as DynamicSampling
from rlx.plugin import PromptLimit as PromptLimit
from rlx.plugin import TurnSpec as TurnSpec
from rlx.spec.reward import PluginUse


class SingleRolloutSpec(Schedule):
    """A prompt, then answers."""

    counts: ClassVar[Mapping[str, str]] = {"answer": "num_generations_answer"}

    schedule: Literal["single"] = "single"
    num_generations_answer: Count = Field(8, ge=1)
    """G_a: answers per prompt."""
    answer: TurnSpec = TurnSpec.model_construct(spans=("think", "answer"))


class TwoTurnRolloutSpec(Schedule):
    """A prompt, answers, and for each answer a question with several confidences."""

    counts: ClassVar[Mapping[str, str]] = {
        "answer": "num_generations_answer",
        "confidence": "num_generations_confidence",
    }

    schedule: Literal["two_turn"] = "two_turn"
    num_generations_answer: Count = Field(8, ge=1)
    """G_a: answers per prompt."""
    answer: TurnSpec = TurnSpec.model_construct(spans=("think", "answer"))
    num_generations_confidence: Count = Field(4, ge=1)
    """G_c: confidences per answer."""
    confidence: TurnSpec


class LevelSpec(TurnSpec):
    """One level of a tree: a kind of turn, its number of samples, and how they are sampled."""

    kind: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=40)]
    """Name of the kind of turn. Calibration is of turns of kind `confidence`; those of kind
    `answer`, or else the first, answer the problem."""
    count: Count = Field(1, ge=1)
    """Turns below every turn of the level before."""


class LevelsRolloutSpec(Schedule):
    """A prompt, then any number of levels of turns, each below every turn of the level before."""

    schedule: Literal["levels"] = "levels"
    levels: tuple[LevelSpec, ...] = Field(min_length=1, max_length=8)
    """Levels of the tree, first turn first, with one kind of turn each."""

    @field_validator("levels")
    @classmethod
    def _check_kinds(cls, levels: tuple[LevelSpec, ...]) -> tuple[LevelSpec, ...]:
        kinds = [level.kind for level in levels]
        for number, kind in enumerate(kinds):
            if kind in kinds[:number]:
                raise ValueError(f"two levels have the kind {kind!r}; each needs its own")
            if kind == FAILED:
                raise ValueError(f"no level can have the kind {kind!r}, which means a failed turn")
        return levels

    @classmethod
    def read_turns(cls, section: Mapping[str, Any]) -> dict[str, Any]:
        levels = section.get("levels")
        named = [one for one in levels if isinstance(one, dict)] if isinstance(levels, list) else []
        return {kind: one for one in named if isinstance(kind := one.get("kind"), str)}

    def list_levels(self) -> tuple[TurnLevel, ...]:
        return tuple(
            TurnLevel(one.kind, one.count, one, ("levels", at), ("levels", at, "count"))
            for at, one in enumerate(self.levels)
        )

    def copy_with_levels(self, levels: Sequence[TurnLevel]) -> Self:
        changed = [
            LevelSpec(kind=v.kind, count=v.count, **v.turn.model_dump(include=_TURN_KEYS))
            for v in levels
        ]
        return self.model_copy(update={"levels": tuple(changed)})

    def arrange_demonstration(self, turns: Sequence[str]) -> tuple[str, ...]:
        """Every block `<name>…</name>` goes to the first level that declares the span `name`, with
        the text between it and the next block. Blocks that no level declares are left out.

        If no level declares any block, the turns stay as they are.
        """
        blocks = _split_blocks("".join(turns), [name for one in self.levels for name in one.spans])
        if not blocks:
            return tuple(turns)
        texts, used = [], set[str]()
        for one in self.levels:
            own = set(one.spans) - used
            used |= own
            texts.append("".join(text for name, text in blocks if name in own))
        while texts and not texts[-1]:
            texts.pop()
        return tuple(texts)


_TURN_KEYS = set(TurnSpec.model_fields)


def _split_blocks(text: str, names: Sequence[str]) -> list[tuple[str, str]]:
    """The blocks with these names, in order, each with what follows it up to the next tag."""
    blocks: list[tuple[str, str]] = []
    position = 0
    while True:
        opened = [(at, name) for name in names if (at := text.find(f"<{name}>", position)) >= 0]
        if not opened:
            return blocks
        start, name = min(opened)
        closing = f"</{name}>"
        end = text.find(closing, start)
        if end < 0:
            return [*blocks, (name, text[start:])]
        position = end + len(closing)
        following = text.find("<", position)
        blocks.append((name, text[start : len(text) if following < 0 else following]))


OnError = Literal["fail", "drop_sample", "drop_group"]


@dataclass(frozen=True, slots=True)
class EnvironmentLimits:
    """What an environment may take, in seconds of one call and of all of an episode, and what its
    faults cost; None lets a turn wait for all others, for any time."""

    call: float
    episode: float
    patience: float | None
    sessions: int
    on_error: OnError


class EnvironmentUse(PluginUse):
    """An environment plugin by name; every other key is an option of the plugin."""

    deadline: float | None = Field(None, gt=0)
    """Time limit of one call, in seconds. null: 5, or 60 if the environment is not replayable."""
    on_error: OnError | None = None
    """What to do with a rollout whose environment raised, hung, crashed or returned an invalid
    step. null: fail, or drop_sample if the environment is not replayable."""


class LiveSessions(StrictModel):
    """Limits of an environment with live sessions."""

    sessions: Count = Field(64, ge=1)
    """Sessions at once, on each rank, if the environment is not replayable."""
    episode_deadline: float | None = Field(None, gt=0)
    """Time limit of all calls of an episode, in seconds. null: none, or 600 if the environment is
    not replayable."""


class McpServer(StrictModel):
    """A server of the Model Context Protocol, by how it is started or by where it is."""

    command: tuple[Annotated[str, Field(min_length=1)], ...] | None = Field(None, min_length=1)
    """The program and its arguments, spoken to over stdin and stdout. Arguments that name files are
    relative to the folder in which the run was submitted."""
    url: Annotated[str, Field(pattern=r"^https?://\S+$")] | None = None
    """Instead of a command, the address of a server that runs."""

    @model_validator(mode="after")
    def _check_place(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise ValueError("name the server by `command` or by `url`, and not by both")
        return self


class McpTools(StrictModel):
    """All tools of a server."""

    mcp: McpServer


FunctionName = Annotated[str, Field(pattern=r"^[^:]+:[A-Za-z_]\w*$")]
"""A Python function: `module:name`, or `FILE.py:name` beside the experiment."""

ToolUse = FunctionName | McpTools
"""What provides tools: a function, which is one, or a server."""

TOOLS = "tools"
"""Name of the environment that answers calls of `rollout.tools`."""


class ForcedAnswer(StrictModel):
    """One extra turn for rollouts that are not done after the last regular turn."""

    template: str = ""
    """Text after the last observation that asks the policy for its answer."""
    max_new_tokens: Count | None = Field(None, ge=1)
    """null uses the limit of the other turns."""


class SelfPlay(StrictModel):
    """The policy plays both players of the training games. In held-out games the environment plays
    the second."""

    learn: Literal["both"] = "both"
    """Whose turns learn: both players'."""


class MultiTurnRolloutSpec(Schedule):
    """A prompt, then rollouts of several turns, each a row with all of its turns."""

    counts: ClassVar[Mapping[str, str]] = {"turn": "num_generations"}

    num_generations: Count = Field(8, ge=1)
    """G: rollouts per prompt."""
    max_turns: Count = Field(6, ge=1)
    """Maximum number of regular turns; a rollout that is done earlier ends earlier."""
    patience: float | None = Field(None, ge=0)
    """Seconds that a turn waits for others to be sampled with. null waits for all, so that a
    resumed run samples the same batches; if the environment is not replayable, 0.2."""
    turn: TurnSpec = TurnSpec.model_construct(spans=("think", "answer"))

    @property
    def last_turn(self) -> int:
        """Number of the last turn that a rollout may have, a forced answer included."""
        return self.max_turns

    @property
    def has_one_turn(self) -> bool:
        """Whether the policy never sees an observation, so that a demonstration is its one turn."""
        return self.last_turn == 1

    @property
    def budgets(self) -> dict[str, int]:
        """Maximum tokens that the policy generates in a row, over all of its turns."""
        return {"turn": self.max_turns * self.turn.max_new_tokens}


class EnvironmentRolloutSpec(MultiTurnRolloutSpec):
    """A prompt, then multi-turn rollouts in which an environment responds to every turn."""

    schedule: Literal["environment"] = "environment"
    tools: tuple[ToolUse, ...] = ()
    """What the policy may call: functions, `module:name` or `FILE.py:name`, and servers as `mcp:
    {command: [...]}` or `mcp: {url: ...}`. A turn without a call ends the rollout."""
    environment: EnvironmentUse = Field(
        EnvironmentUse.model_construct(set(), plugin=TOOLS, deadline=30.0), validate_default=True
    )
    """What answers the turns; may be left out with `tools`."""
    turn: TurnSpec = TurnSpec.model_construct(spans=("think", "answer"))
    """Sampling of every turn; the template is shown before the first."""
    forced_answer: ForcedAnswer | None = None
    """null ends a rollout after `max_turns`, done or not."""
    observation: Literal["message", "inline"] = "message"
    """How observations are shown to the policy: message, as a user message in the model's dialogue
    format; inline, as tokens directly after the turn (KG-R1)."""
    self_play: SelfPlay | None = None
    """null lets the environment play every other player, in training too."""
    live: LiveSessions = LiveSessions()

    def resolve_limits(self, *, replayable: bool) -> EnvironmentLimits:
        """The limits, with the defaults of an environment that is replayable or is not."""
        own, live = self.environment, self.live
        return EnvironmentLimits(
            call=own.deadline or (5.0 if replayable else 60.0),
            episode=live.episode_deadline or (math.inf if replayable else 600.0),
            patience=0.2 if self.patience is None and not replayable else self.patience,
            sessions=live.sessions,
            on_error=own.on_error or ("fail" if replayable else "drop_sample"),
        )

    @field_validator("environment")
    @classmethod
    def _require_environment(cls, use: EnvironmentUse, info: ValidationInfo) -> EnvironmentUse:
        if not use.model_fields_set and info.data.get("tools") == ():
            raise PydanticKnownError("missing")
        return use

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        if (self.environment.plugin == TOOLS) != bool(self.tools):
            raise ValueError("environment: `tools` is for the key `tools`, and no other is")
        if self.tools and self.environment.model_extra:
            raise ValueError("environment: with `tools` it has `deadline` and `on_error` alone")
        if self.tools and self.observation == "inline":
            raise ValueError("observation: results of tools are messages of their own, not inline")
        if self.tools and self.self_play is not None:
            raise ValueError("self_play: tools are for one player")
        return self

    @property
    def players(self) -> int:
        """Number of players that the policy is in training."""
        return 1 if self.self_play is None else 2

    @property
    def rows_per_step(self) -> int:
        return self.prompts_per_step * self.num_generations * self.players

    @property
    def last_turn(self) -> int:
        return self.max_turns + (self.forced_answer is not None)

    @property
    def budgets(self) -> dict[str, int]:
        forced = self.forced_answer
        last = 0 if forced is None else forced.max_new_tokens or self.turn.max_new_tokens
        return {"turn": self.max_turns * self.turn.max_new_tokens + last}


class AgentRolloutSpec(MultiTurnRolloutSpec):
    """A prompt, then rollouts of a program that asks the policy for its turns over HTTP."""

    schedule: Literal["agent"] = "agent"
    command: tuple[Annotated[str, Field(min_length=1)], ...] | None = Field(None, min_length=1)
    """The program and its arguments. Arguments that name files are relative to the folder in which
    the run was submitted."""
    function: FunctionName | None = None
    """Instead of a command, a Python function, `module:name` or `FILE.py:name`, called with the
    problem, the address and the key."""
    turn: TurnSpec = TurnSpec.model_construct(spans=("think", "answer"))
    """Sampling of every turn, whatever a request asks for. The template is that of the program's
    first message, for warm starts, `rlx plan` and `max_prompt_tokens`."""
    deadline: float = Field(60.0, gt=0)
    """Seconds that a program may take in all, its waiting for the model not counted."""
    memory_mb: Count | None = Field(4096, ge=64)
    """MiB of address space of each of a program's processes; null does not limit it."""
    file_mb: Count = Field(64, ge=1)
    """MiB of the largest file that a program may write, and of its output."""
    programs: Count = Field(64, ge=1)
    """Programs that run at once, on each rank."""
    on_error: OnError = "drop_sample"
    """What to do with a rollout whose program failed, hung, flooded or made no request."""

    @model_validator(mode="after")
    def _check_program(self) -> Self:
        if (self.command is None) == (self.function is None):
            raise ValueError("name the agent by `command` or by `function`, and not by both")
        if self.turn.prefix:
            raise ValueError("turn.prefix: an agent's turns begin as the model begins them")
        return self


SCHEDULES: Final = PluginSection(
    base=Schedule,
    group="rlx.schedules",
    kind="schedule",
    key="schedule",
    shipped={
        "single": SingleRolloutSpec,
        "two_turn": TwoTurnRolloutSpec,
        "levels": LevelsRolloutSpec,
        "environment": EnvironmentRolloutSpec,
        "agent": AgentRolloutSpec,
    },
)

RolloutSpec = Annotated[Schedule, SCHEDULES]
