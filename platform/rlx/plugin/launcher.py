"""Settings of a launcher. Only what starts or watches runs imports the class that they name."""

from typing import ClassVar

from rlx.plugin.base import Plugin, StrictModel

__all__ = ["LauncherPlugin"]


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
