"""What rewards that run code of an answer have in common: which code, and limits of a sandbox."""

import signal

from pydantic import Field

from rlx.plugin import Sample
from rlx_plugins.answers import SpanReward
from rlx_plugins.code.sandbox import SandboxOptions


class CodeReward(SandboxOptions, SpanReward):
    """Base of rewards that run code of an answer in a sandbox."""

    span: str | None = None
    """The span that holds the code; null for the last fenced block of the response."""
    seconds: float = Field(4.0, gt=0, allow_inf_nan=False)
    """Time for one answer, once its sandbox is ready. `deadline` must leave room for the start."""

    def warnings(self) -> tuple[str, ...]:
        if not self.unsafe:
            return ()
        return (
            "`unsafe: true` runs code of the model with your permissions, outside of a sandbox",
        )

    def check(self) -> None:
        self.check_sandbox()

    def find_code(self, sample: Sample) -> str | None:
        """The code of a response; None without any."""
        if self.span is not None:
            code = sample.spans.get(self.span)
        else:
            code = find_last_fenced_block(sample.response)
        return code if code and code.strip() else None

    def describe_end(self, code: int | None) -> str:
        """Says how a program ended that should have gone on; None if it still ran."""
        if code is None:
            return f"time: more than {self.seconds:g} s"
        if code in (128 + signal.SIGXCPU, 128 + signal.SIGKILL):
            return f"time: more than {self.cpu_seconds} s of processor time, or killed"
        if code > 128:
            return f"ended: signal {code - 128}"
        return f"ended: exit code {code}"

    @property
    def memory_reason(self) -> str:
        return f"memory: more than {self.memory_mb} MiB"

    @property
    def output_reason(self) -> str:
        return f"output: more than {self.output_kb} KiB"


def find_last_fenced_block(text: str) -> str | None:
    """Returns the last closed block between lines that begin with three backticks, or None."""
    last: str | None = None
    lines: list[str] | None = None
    for line in text.split("\n"):
        if not line.lstrip().startswith("```"):
            if lines is not None:
                lines.append(line)
        elif lines is None:
            lines = []
        else:
            last, lines = "\n".join(lines), None
    return last


def strip_lines(text: str) -> list[str]:
    """Returns the lines of an output, without white space that nobody sees."""
    return [line.rstrip() for line in text.strip().split("\n")]
