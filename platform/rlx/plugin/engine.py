"""What a launcher and a sampler promise."""

from typing import ClassVar, Self

from pydantic import Field

from rlx.plugin.base import Count, Plugin, StrictModel


class LauncherPlugin(StrictModel, Plugin):
    """The `runner.launcher` section of one launcher, selected by the field `kind`.

    A subclass declares `kind: Literal["NAME"] = "NAME"`, with the name of its entry point.

    Attributes:
        implementation: "module:Class" of a `rlx.launch.Launcher`, or a function that returns one;
            of a `rlx.launch.JobLauncher` if `submits_jobs`.
        submits_jobs: whether a job system starts each run's supervisor, and not `rlx submit`.
    """

    implementation: ClassVar[str]
    submits_jobs: ClassVar[bool] = False

    kind: str

    def check_ranks(self, ranks: int) -> None:
        """Checks that the launcher can place this number of ranks.

        Raises:
            ValueError: it cannot.
        """


class SamplerPlugin(StrictModel, Plugin):
    """The `sampler:` section of one engine, selected by the field `engine`.

    A subclass declares `engine: Literal["NAME"] = "NAME"`, with the name of its entry point.

    Attributes:
        implementation: "module:function". Called as `f(policy, settings, runner, device)` with the
            arguments of `rlx.sampler.open_sampler`; returns a context manager of a
            `rlx.sampler.SamplingEngine`.
        own_model: whether the engine computes log-probabilities by code of its own. If so, a run
            compares them with the learner's after each update, and stops if they differ.
        min_temperature: lowest temperature that the engine supports.
        holds_weights_apart: whether weights are copied once more on their way to the engine.
    """

    implementation: ClassVar[str]
    own_model: ClassVar[bool] = True
    min_temperature: ClassVar[float] = 0.0
    holds_weights_apart: ClassVar[bool] = False

    engine: str
    max_rows: Count = Field(512, ge=1)
    """Rows decoded together."""

    @property
    def needs_gpu(self) -> bool:
        """Whether these settings require a GPU."""
        return False

    def for_length(self, tokens: int) -> Self:
        """Returns the settings for an experiment whose dialogues have about this many tokens."""
        return self

    @property
    def cache_bytes(self) -> int | None:
        """Size of the KV cache; None if it grows with the rows that are decoded together."""
        return None

    @property
    def dialogues_at_once(self) -> int | None:
        """Dialogues that go through all their turns together, so that no more caches are kept from
        turn to turn; None: all of a step."""
        return None

    @property
    def max_drift(self) -> float | None:
        """Maximum mean difference, in nats, between the engine's log-probabilities and the
        learner's under the same weights; None: 0.001 in float32, 0.1 in bfloat16."""
        return None
