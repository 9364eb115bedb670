"""The reward `command`: runs a command on an answer."""

import tempfile
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from rlx.plugin import Example, Sample, Score
from rlx_plugins.code.code_reward import CodeReward, strip_lines
from rlx_plugins.examples import build_example


def _build_example(name: str, code: str, value: float, **options: Any) -> Example:
    response = f"```sh\n{code}\n```"
    return build_example(name, value, response, options=options, problem={"sum": "7\n"})


class Command(CodeReward):
    """1 if a command that gets the answer on stdin ends with exit code 0 in a sandbox, else 0.

    With `output`, what it writes to stdout must be the text in that field of the problem. A command
    that runs the answer itself needs `output`: an answer can end its process with any exit code.
    """

    examples: ClassVar[tuple[Example, ...]] = (
        _build_example("gold", "echo $((3 + 4))", 1.0, command=["sh"], output="sum"),
        _build_example("wrong", "echo 34", 0.0, command=["sh"], output="sum"),
        _build_example("only exits", "exit 0", 0.0, command=["sh"], output="sum"),
        _build_example("no syntax", "if", 0.0, command=["sh", "-n"]),
    )

    command: Annotated[tuple[str, ...], Field(min_length=1)]
    """The program and its arguments; no shell reads them."""
    output: str | None = None
    """The problem's field with what the command must write to stdout; null if only its exit code
    counts."""

    def check(self) -> None:
        super().check()
        look = ["sh", "-c", 'command -v "$0"', self.command[0]]
        with self.start_program(look) as process:
            if process.wait(60.0) != 0:
                raise FileNotFoundError(
                    f"the sandbox, which shows /usr, has no program {self.command[0]!r}"
                )

    def check_problem(self, problem: Mapping[str, Any]) -> None:
        self._get_output(problem)

    def value_range(self) -> tuple[float, float]:
        return 0.0, 1.0

    def score(self, sample: Sample) -> Score:
        right = self._get_output(sample.problem)
        code = self.find_code(sample)
        if code is None:
            return Score(0.0, "no code")
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout:
            stdin.write(code.encode(errors="replace"))
            stdin.seek(0)
            with self.start_program(self.command, stdin=stdin, stdout=stdout) as process:
                status = process.wait(self.seconds)
            stdout.seek(0)
            written = stdout.read((self.output_kb << 10) + 1)
        if len(written) >= self.output_kb << 10:
            return Score(0.0, self.output_reason)
        if status != 0:
            return Score(0.0, self.describe_end(status))
        if right is not None and strip_lines(written.decode(errors="replace")) != right:
            return Score(0.0, "wrong output")
        return Score(1.0)

    def _get_output(self, problem: Mapping[str, Any]) -> list[str] | None:
        if self.output is None:
            return None
        right = problem.get(self.output)
        if not isinstance(right, str):
            raise ValueError(f"the field {self.output!r} must hold the right output, as text")
        return strip_lines(right)
