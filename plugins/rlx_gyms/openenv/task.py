"""The task `openenv`: first observations of a running server's episodes."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from typing import Any, ClassVar

from pydantic import Field

from rlx.plugin import Demonstration, Problem, Split
from rlx_gyms.beginnings import draw_beginning
from rlx_gyms.libraries import NeedsLibrary
from rlx_gyms.openenv.session import OpenEnvEpisode, OpenEnvSession
from rlx_gyms.remote import RemoteFault

__all__ = ["OpenEnvTask"]


class OpenEnvTask(NeedsLibrary):
    """Episodes of a running OpenEnv server, each with a seed of its own.

    The prompt is what the server shows after `reset`, and its hash decides whether the episode is
    for training or for testing; the seed's hash does if the server always shows the same. The
    environment is `openenv`.
    """

    library: ClassVar[str] = "websockets"
    demonstrates: ClassVar[bool] = False

    url: str = Field("http://localhost:8000", pattern="^(http|ws)s?://")
    """Where the server listens."""
    observation: str = ""
    """Field of its observations with the text; empty shows all fields as JSON."""
    reset: Mapping[str, Any] = Field(default_factory=dict)
    """Arguments of `reset` beside the seed, such as `{difficulty: easy}`."""
    held_out: int = Field(3, ge=2)
    """One in `held_out` beginnings is held out for testing."""
    prompt: str = "{observation}"
    """The prompt; `{observation}` is what the server shows first."""
    timeout: float = Field(10.0, gt=0)
    """Seconds for an answer."""

    def check(self) -> None:
        """Checks that the server answers.

        Raises:
            ImportError: the library is missing.
            ValueError: the server does not answer as it should.
        """
        super().check()
        try:
            _show_beginning(self._get_episode(0), self.timeout)
        except RemoteFault as fault:
            raise ValueError(str(fault)) from None

    def _get_episode(self, seed: int) -> OpenEnvEpisode:
        options = json.dumps(dict(self.reset), sort_keys=True)
        return OpenEnvEpisode(self.url, self.observation, seed, options)

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        """Returns problem number `index` of a split; the same for the same arguments.

        Raises:
            RemoteFault: the server does not answer.
        """
        key = f"openenv/{self.url}/{seed}/{split}/{index}"
        beginning = draw_beginning(key, split, self.held_out, self._show)
        return Problem(
            id=f"openenv/{self.url}/{beginning.seed}",
            prompt=self.prompt.replace("{observation}", beginning.shown),
            fields={"data_source": self.url, **asdict(self._get_episode(beginning.seed))},
        )

    def _show(self, seed: int) -> str:
        return _show_beginning(self._get_episode(seed), self.timeout)

    def demonstration(self, problem: Problem, seed: int) -> Demonstration:
        """Raises NotImplementedError: a server shows no solutions."""
        raise NotImplementedError("a server of OpenEnv shows no solutions")


@lru_cache(maxsize=4096)
def _show_beginning(episode: OpenEnvEpisode, timeout: float) -> str:
    session = OpenEnvSession(episode, timeout)
    try:
        return session.reset().observation
    finally:
        session.close()
