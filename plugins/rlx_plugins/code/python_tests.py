"""The reward `python_tests`: Python code of an answer against the tests of its problem."""

import ast
import builtins
import inspect
import math
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, ClassVar

from rlx.plugin import Example, Sample, Score
from rlx_plugins.code import inside
from rlx_plugins.code.code_reward import CodeReward, strip_lines
from rlx_plugins.code.sandbox import SandboxError, SandboxOptions, SandboxProcess, find_python
from rlx_plugins.examples import build_example
from rlx_plugins.records import format_short_repr

_START_SECONDS = 60.0
"""Time for the start of a sandbox, which `deadline` usually cuts."""
_LONGEST_TESTS = 16 << 20
"""Bytes of the tests of one problem."""


@dataclass(frozen=True, slots=True)
class CodeTest:
    """A test in Python, with the answer's names and the modules of Python that it uses."""

    code: str
    names: tuple[str, ...]
    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TextTest:
    """A test of a program: what it reads, and what it has to write."""

    input: str
    output: str


Tests = tuple[CodeTest, ...] | tuple[TextTest, ...]


def _build_example(name: str, code: str, value: float, reason: str | None = None) -> Example:
    problem = {"tests": ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]}
    return build_example(name, value, f"```python\n{code}\n```", reason=reason, problem=problem)


class PythonTests(CodeReward):
    """1 if Python code of the answer passes the tests of its problem in a sandbox, else 0.

    Tests are Python code that uses the answer's names (`assert add(1, 2) == 3`, or functions
    `test_*`), a list of such code, or a list of `{input, output}` for programs that read stdin and
    write stdout.
    """

    examples: ClassVar[tuple[Example, ...]] = (
        _build_example("gold", "def add(a, b):\n    return a + b", 1.0),
        _build_example(
            "wrong",
            "def add(a, b):\n    return 3",
            0.0,
            "test 2 of 2: AssertionError",
        ),
        _build_example("no code", "", 0.0, "no code"),
        _build_example(
            "equal to everything",
            "class Any:\n    def __eq__(self, other):\n        return True\n\n"
            "def add(a, b):\n    return Any()",
            0.0,
            "test 1 of 2: AssertionError",
        ),
        _build_example("leaves", "import os\nos._exit(0)", 0.0, "ended: exit code 0"),
    )

    field: str = "tests"
    """The problem's field that holds the tests."""

    def check_problem(self, problem: Mapping[str, Any]) -> None:
        self._read_tests(problem)

    def value_range(self) -> tuple[float, float]:
        return 0.0, 1.0

    def score(self, sample: Sample) -> Score:
        tests = self._read_tests(sample.problem)
        code = self.find_code(sample)
        if code is None:
            return Score(0.0, "no code")
        passed, why = self._run_tests(code, tests)
        share = sum(passed) / len(tests)
        return Score(float(share == 1.0), why, {"passed": share})

    def _read_tests(self, problem: Mapping[str, Any]) -> Tests:
        tests: Any = problem.get(self.field)
        items = list(tests) if isinstance(tests, list | tuple) else [tests]
        if items and all(isinstance(item, Mapping) for item in items):
            return tuple(_read_text_test(item, self.field) for item in items)
        if not items or not all(isinstance(item, str) and item.strip() for item in items):
            raise ValueError(
                f"the field {self.field!r} must hold tests: code, a list of code, or a list of "
                f"{{input, output}}; got {format_short_repr(tests)}"
            )
        return tuple(map(_read_code_test, items))

    def _run_tests(self, code: str, tests: Tests) -> tuple[Sequence[bool], str | None]:
        """Which tests pass, and why the first one does not that does not."""
        with ExitStack() as stack:
            ours, theirs = _open_sockets(stack)
            if isinstance(tests[0], TextTest):
                answer = self._start(stack, "run", self, theirs)
                started = [answer]
            else:
                to_tests, to_answer = _open_sockets(stack)
                answer = self._start(stack, "serve", self, to_tests)
                # Tests end with the answer, or with the time.
                patient = self.model_copy(update={"cpu_seconds": math.ceil(self.seconds) + 1})
                started = [answer, self._start(stack, "tests", patient, theirs, to_answer)]
            line = inside.Channel(ours.fileno(), self._longest)
            _await_start(line, ours, started)
            until = time.monotonic() + self.seconds
            try:
                with _limit_time(ours, self.seconds):
                    if isinstance(tests[0], TextTest):
                        return self._compare_outputs(line, code, tests)
                    line.send({"code": code, "tests": [asdict(test) for test in tests]})
                    report = line.receive()
                return report["passed"], report["why"] and self._explain(report["why"], answer)
            except inside.Stopped as reason:
                if time.monotonic() >= until:
                    return (), self.describe_end(None)
                if len(started) == 2:
                    raise SandboxError(f"the tests {reason}") from None
                return (), self._explain(str(reason), answer)

    def _start(
        self, stack: ExitStack, side: str, sandbox: SandboxOptions, *sockets: socket.socket
    ) -> SandboxProcess:
        """Starts one side, which alone then has these sockets."""
        numbers = [each.fileno() for each in sockets]
        program = [find_python(), "-s", "-P", "-S", "-c", inspect.getsource(inside)]
        command = [*program, *map(str, (side, self._longest, *numbers))]
        process = stack.enter_context(sandbox.start_program(command, descriptors=numbers))
        for each in sockets:
            each.close()
        return process

    @property
    def _longest(self) -> int:
        return max(self.output_kb << 10, 64 << 10) + _LONGEST_TESTS

    def _compare_outputs(
        self, line: inside.Channel, code: str, tests: Sequence[Any]
    ) -> tuple[Sequence[bool], str | None]:
        passed: list[bool] = []
        line.send(code)
        for number, test in enumerate(tests, 1):
            line.send(test.input)
            written, status = _read_outcome(line.receive())
            why = None if strip_lines(written) == strip_lines(test.output) else "wrong output"
            if len(written) >= self.output_kb << 10:
                why = self.output_reason
            elif status == inside.OUT_OF_MEMORY:
                why = self.memory_reason
            elif status:
                why = self.describe_end(status if status > 0 else 128 - status)
            passed.append(why is None)
            if why is not None:
                return passed, f"test {number} of {len(tests)}: {why}"
        return passed, None

    def _explain(self, why: str, answer: SandboxProcess) -> str:
        """The reason in words that are the same for every kind of test."""
        if why == "ended":
            return self.describe_end(answer.wait(1.0))
        if why.startswith("output"):
            return self.output_reason
        if why.endswith("MemoryError"):
            return self.memory_reason
        return why


@contextmanager
def _limit_time(ours: socket.socket, seconds: float) -> Iterator[None]:
    """Shuts a socket after a time, which ends every wait for the other side."""
    timer = threading.Timer(seconds, ours.shutdown, [socket.SHUT_RDWR])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _await_start(
    line: inside.Channel, ours: socket.socket, started: Sequence[SandboxProcess]
) -> None:
    """Waits until all sides are ready, before any of them has seen code of the model."""
    with suppress(inside.Stopped), _limit_time(ours, _START_SECONDS):
        if line.receive() == "ready":
            return
    codes = [process.wait(1.0) for process in started]
    raise SandboxError(f"Python does not start in the sandbox (exit codes {codes})")


def _open_sockets(stack: ExitStack) -> tuple[socket.socket, socket.socket]:
    one, other = socket.socketpair()
    stack.callback(one.close)
    stack.callback(other.close)
    return one, other


def _read_outcome(message: Any) -> tuple[str, int]:
    """What a program wrote, and its exit code; a program may have sent another message."""
    if isinstance(message, dict):
        written, status = message.get("stdout"), message.get("status")
        if isinstance(written, str) and type(status) is int and abs(status) < 256:
            return written, status
    raise inside.Stopped("unreadable value")


def _read_text_test(item: Mapping[str, Any], field: str) -> TextTest:
    texts = item.get("input"), item.get("output")
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"a test in the field {field!r} must have an input and an output, as text")
    return TextTest(*map(str, texts))


@lru_cache(maxsize=1024)
def _read_code_test(code: str) -> CodeTest:
    """Finds what a test takes from the answer: the names that it reads and does not define."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"a test is not Python: {error}: {format_short_repr(code)}") from error
    names: dict[str, bool] = {}
    own = set(dir(builtins))
    bases: set[ast.expr] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            bases.add(node.value)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.alias):
            own.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.arg):
            own.add(node.arg)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            own.add(node.name)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            own.add(node.id)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in own:
            names[node.id] = names.get(node.id, True) and node in bases
    modules = [n for n, is_base in names.items() if is_base and n in sys.stdlib_module_names]
    asked = tuple(name for name in names if name not in modules)
    if not asked:
        raise ValueError(f"a test uses nothing of the answer: {format_short_repr(code)}")
    return CodeTest(code, asked, tuple(modules))
