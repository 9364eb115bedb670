"""Serves a taskset of verifiers by lines of JSON; the interpreter of the taskset runs this file.

Nothing of rlx is imported here. The only argument is JSON: `{"taskset": ..., "config": {...}}`.
The first line says whether the taskset is there, then each line answers one request:

    {"type": "row", "data": {"index": 3}}                  → prompt, system
    {"type": "score", "data": {"index": 3, "text": "…"}}   → reward, rewards, metrics
"""

import asyncio
import inspect
import json
import os
import sys
from itertools import islice
from pathlib import Path
from typing import Any

MOST_ROWS = 10_000  # a taskset may have no end


def main() -> None:
    """Answers requests until the input ends."""
    # What the taskset prints must not stand between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # A process that the taskset forks must not hold the answers open when this one is killed.
    os.register_at_fork(after_in_child=answers.close)
    rows: Rows | None = None
    try:
        rows = Rows(**json.loads(sys.argv[1]))
        answer = {"count": len(rows.tasks)}
    except Exception as error:  # noqa: BLE001  (rlx gets it as an answer)
        answer = describe(error)
    print(json.dumps(answer), file=answers, flush=True)
    for line in sys.stdin if rows is not None else ():
        request = json.loads(line)
        try:
            answer = getattr(rows, request["type"])(**request["data"])
        except Exception as error:  # noqa: BLE001
            answer = describe(error)
        print(json.dumps(answer), file=answers, flush=True)


def describe(error: Exception) -> dict[str, Any]:
    return {"error": type(error).__name__, "message": str(error)[:2000]}


class Rows:
    """The rows of a taskset and their scores."""

    def __init__(self, taskset: str, config: dict[str, Any]) -> None:
        import verifiers.v1 as vf
        from verifiers.v1.utils.loaders import taskset_class, taskset_config_type

        self.vf = vf
        name = find_package(taskset)
        settings = taskset_config_type(name).model_validate({**config, "id": name})
        tasks = iter(taskset_class(name)(settings))
        self.tasks = list(islice(tasks, MOST_ROWS))
        if not self.tasks:
            raise ValueError(f"the taskset {taskset!r} has no tasks")
        self.check_rewards(self.tasks[0])

    def check_rewards(self, task: Any) -> None:
        """Refuses what scoring would leave out without a word: rewards that need a sandbox."""
        for hook in task.hooks("reward"):
            parameter = inspect.signature(hook).parameters.get("runtime")
            if parameter is not None and parameter.default is inspect.Parameter.empty:
                raise ValueError(
                    f"the reward {hook.__name__!r} needs a runtime, which rlx does not provide"
                )

    def row(self, index: int) -> dict[str, Any]:
        data = self.tasks[index].data
        if not isinstance(data.prompt, str):
            roles = {message.role for message in data.prompt or []}
            if roles != {"user"}:
                raise ValueError(
                    f"a prompt of messages by {sorted(roles)}; only the user's can be read"
                )
        return {"prompt": data.prompt_text, "system": data.system_prompt or ""}

    def score(self, index: int, text: str) -> dict[str, Any]:
        task = self.tasks[index]
        trace = self.build_trace(task, text)
        asyncio.run(task.score(trace))
        rewards = {name: reward.value for name, reward in trace.rewards.items()}
        return {"reward": trace.reward, "rewards": rewards, "metrics": dict(trace.metrics)}

    def build_trace(self, task: Any, text: str) -> Any:
        """A conversation of the prompt and one answer, as an agent would have left it."""
        from verifiers.v1.graph import MessageNode
        from verifiers.v1.state import state_cls
        from verifiers.v1.trace import AgentInfo, TraceTask
        from verifiers.v1.types import AssistantMessage, UserMessage

        prompt = UserMessage(content=task.data.prompt_text)
        answer = AssistantMessage(content=text)
        return self.vf.Trace(
            task=TraceTask(type=type(task).__name__, data=task.data),
            agent=AgentInfo(config=self.vf.AgentConfig()),
            state=state_cls(type(task))(),
            nodes=[
                MessageNode(message=prompt),
                MessageNode(message=answer, parent=0, sampled=True),
            ],
        )


def find_package(taskset: str) -> str:
    """The name of a taskset's package, which can be imported afterwards; a folder is the package
    itself, or a project with the package in it."""
    folder = Path(os.path.expanduser(taskset))  # noqa: PTH111  (the method raises for unknown users)
    if not folder.is_dir():
        return taskset
    name = folder.resolve().name.replace("-", "_")
    is_package = (folder / "__init__.py").exists()
    sys.path.insert(0, str(folder.resolve().parent if is_package else folder.resolve()))
    return name


if __name__ == "__main__":
    main()
