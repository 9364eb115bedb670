"""The environment `verifiers`: one answer, scored by the taskset."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from rlx_gyms.remote import RemoteEnvironment, RemoteReply, read_number
from rlx_gyms.verifiers.process import TasksetSource, get_process

__all__ = ["VerifiersEnvironment"]


@dataclass(frozen=True, slots=True)
class _RowSession:
    """An episode of one turn. It holds no connection, so it is stored and not replayed."""

    source: TasksetSource
    index: int
    timeout: float

    def reset(self) -> RemoteReply:
        """Begins the episode: there is nothing to show but the prompt."""
        return RemoteReply()

    def step(self, text: str) -> RemoteReply:
        """Has the answer scored."""
        process = get_process(self.source)
        answer = process.request("score", self.timeout, index=self.index, text=text)
        name = self.source.taskset
        rewards, metrics = (answer.get(part) or {} for part in ("rewards", "metrics"))
        return RemoteReply(
            reward=read_number(answer.get("reward"), "reward", name),
            done=True,
            info={
                str(key): read_number(value, str(key), name)
                for key, value in {**metrics, **rewards}.items()
            },
        )

    def close(self) -> None:
        """Does nothing: the process serves other episodes."""


class VerifiersEnvironment(RemoteEnvironment):
    """Scores the answers to rows of the task `verifiers` by the taskset's own rewards.

    An episode has one turn: `max_turns: 1`. `info` also holds the taskset's rewards, with their
    weights, and its metrics by name.
    """

    kinds: ClassVar[tuple[str, ...]] = ("turn", "invalid")

    span: str = ""
    """The span that is scored; empty for the whole turn, which most tasksets expect."""

    def connect(self, problem: Mapping[str, Any]) -> _RowSession:
        """Returns the session of a row.

        Raises:
            ValueError: the problem is of another task.
        """
        if "taskset" not in problem:
            raise ValueError("the environment `verifiers` works only with the task `verifiers`")
        source = TasksetSource(**{f.name: problem[f.name] for f in fields(TasksetSource)})
        return _RowSession(source, problem["index"], self.timeout)
