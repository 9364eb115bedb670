"""The environment `openenv`: episodes of a running server."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar

from pydantic import Field

from rlx_gyms.libraries import NeedsLibrary
from rlx_gyms.openenv.session import OpenEnvEpisode, OpenEnvSession
from rlx_gyms.remote import RemoteEnvironment

__all__ = ["OpenEnvEnvironment"]


class OpenEnvEnvironment(NeedsLibrary, RemoteEnvironment):
    """Plays on the server that the task `openenv` names.

    `info` also holds the numbers of the server's `metadata`. An action that the server's types
    refuse is a turn of the kind `invalid`.
    """

    library: ClassVar[str] = "websockets"

    action: str = Field("message", min_length=1)
    """Field of the server's actions with the model's text."""
    rest: Mapping[str, Any] = Field(default_factory=dict)
    """Other fields of every action, such as `{game_name: catch}`."""

    def connect(self, problem: Mapping[str, Any]) -> OpenEnvSession:
        """Returns a session of the server that has not begun.

        Raises:
            ValueError: the problem is of another task.
        """
        if "url" not in problem:
            raise ValueError("the environment `openenv` works only with the task `openenv`")
        episode = OpenEnvEpisode(**{f.name: problem[f.name] for f in fields(OpenEnvEpisode)})
        return OpenEnvSession(episode, self.timeout, action=self.action, rest=self.rest)
