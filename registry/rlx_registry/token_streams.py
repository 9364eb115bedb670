"""The table of token streams: every tensor of a step that has values per token, state or row.

Estimators name streams in `needs`; `rlx.discovery` says what an experiment must have for them, the
training step computes them, `rlx plan` makes them up, rollout files hold them, and the dashboard
colours tokens by them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

Shape = Literal["[B, T]", "[B, S + 1]", "[B]"]


@dataclass(frozen=True, slots=True)
class TokenStream:
    """One stream.

    Attributes:
        name: name in `needs`, in `rlx.credit.CreditInputs` and in rollout files.
        shape: B rows, T tokens; S + 1 states, those between which the S reasoning steps of
            `step_ids` lie. Rollout files hold a value per state at each token of the step that
            begins there.
        provider: who computes it: "policy", "step" (what every step has before it assigns credit),
            "credit" (what follows), else a key of `rlx.discovery.PROVIDERS`.
        title: what the dashboard calls it; "" if tokens are not coloured by it.
        unit: "nats" for log-probabilities, "reward" for what is on the scale of rewards.
        column: its name in rollout files; "" if that is `name`.
    """

    name: str
    shape: Shape
    provider: str
    title: str = ""
    dtype: Literal["bool", "int64", "float32"] = "float32"
    unit: Literal["", "nats", "reward"] = ""
    column: str = ""

    @property
    def is_output(self) -> bool:
        """Whether it is an output of models, not of the equations of a step."""
        return self.provider not in ("step", "credit")

    @property
    def is_optional(self) -> bool:
        """Whether it is computed only for those who need it."""
        return self.is_output and self.provider != "policy"

    @property
    def stored_name(self) -> str:
        """Its name in rollout files."""
        return self.column or self.name


_TABLE = (
    TokenStream("mask", "[B, T]", "step", dtype="bool"),
    TokenStream("weights", "[B, T]", "credit", "weight"),
    TokenStream("advantages", "[B, T]", "credit", "advantage"),
    TokenStream("old_logprobs", "[B, T]", "policy", "log-probability, learner", unit="nats"),
    TokenStream(
        "reference_logprobs", "[B, T]", "reference", "log-probability, reference", unit="nats"
    ),
    TokenStream("collision_probs", "[B, T]", "distributions", "Σπ² of the next token"),
    TokenStream("values", "[B, T]", "critic", "value", unit="reward"),
    TokenStream("placed", "[B, T]", "credit", "reward placed"),
    TokenStream("token_rewards", "[B, T]", "step", "token reward"),
    TokenStream("kl", "[B, T]", "credit", "KL from reference"),
    TokenStream("returns", "[B, T]", "credit", "return"),
    TokenStream("step_ids", "[B, T]", "monte_carlo", dtype="int64"),
    TokenStream("mc_values", "[B, S + 1]", "monte_carlo", "Monte-Carlo value", unit="reward"),
    TokenStream("greedy_scores", "[B]", "greedy_answer", unit="reward", column="greedy_score"),
)

STREAMS: Final[Mapping[str, TokenStream]] = MappingProxyType({s.name: s for s in _TABLE})
"""Every stream by name, in the order of the columns of rollout files."""
