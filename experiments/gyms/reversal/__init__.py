"""A taskset of verifiers: three letters are to be written in reverse."""

from itertools import product

import verifiers.v1 as vf


class ReversalData(vf.TaskData):
    answer: str


class ReversalConfig(vf.TasksetConfig):
    letters: str = "abcdefgh"


class ReversalTask(vf.Task[ReversalData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def reversed(self, task: ReversalData, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == task.answer)


class ReversalTaskset(vf.Taskset[ReversalTask, ReversalConfig]):
    def load(self):
        for letters in product(self.config.letters, repeat=3):
            word = "".join(letters)
            yield ReversalTask(
                ReversalData(prompt=f"{word} reversed: ", answer=word[::-1]), self.config.task
            )


__all__ = ["ReversalTaskset"]
