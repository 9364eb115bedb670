"""`python_tests` and `command`: which code and tests they read, and what they say of each answer.

They run without the sandbox here; tests/system tries them in it, with hostile programs.
"""

import pytest
from rows import each_row

from rlx.plugin import Sample
from rlx_plugins.code.code_reward import find_last_fenced_block
from rlx_plugins.code.command import Command
from rlx_plugins.code.python_tests import PythonTests


def build_sample(code, **problem):
    return Sample(
        id="a", problem=problem, turn="answer", number=1, response=f"```python\n{code}\n```"
    )


@each_row(
    ("text", "block"),
    [
        ("```python\na = 1\n```", "a = 1"),
        ("so:\n```\na\n```\nor\n  ```py\nb\nc\n  ```\ndone", "b\nc"),
        ("```\na\n```\nthen ```\nb", "a"),
        ("```\na\n```\n```python\nis cut of", "a"),
        ("no code", None),
        ("```", None),
        ("```\n```", ""),
    ],
)
def test_the_last_closed_block_is_the_answer(text, block):
    assert find_last_fenced_block(text) == block


@each_row(
    ("tests", "message"),
    [
        (None, "the field 'tests' must hold tests"),
        ([], "the field 'tests' must hold tests"),
        ("  ", "the field 'tests' must hold tests"),
        (["assert f(1)", {"input": "1"}], "the field 'tests' must hold tests"),
        ([{"input": "1"}], "must have an input and an output, as text"),
        ([{"input": 1, "output": 1}], "must have an input and an output, as text"),
        ("assert f(", "a test is not Python"),
        ("assert 1 == 1", "a test uses nothing of the answer"),
    ],
)
def test_what_is_wrong_with_the_tests_is_said(tests, message):
    with pytest.raises(ValueError, match=message):
        PythonTests().check_problem({"tests": tests})


ADD = "def add(a, b):\n    return a + b"


@each_row(
    ("code", "tests", "options", "value", "reason"),
    [
        (ADD, "def test_it():\n    assert add(1, 1) == 3", {}, 0.0, "test 1 of 1: AssertionError"),
        (ADD, ["assert add(1, 1) == 2", "assert add(1, 1) == 3"], {}, 0.0,
         "test 2 of 2: AssertionError"),
        (ADD, "assert add('a', 'b') == 'ab'\nassert add((1,), (2,)) == (1, 2)", {}, 1.0, None),
        (ADD, "assert math.isclose(add(1, 2), len('abc'))", {}, 1.0, None),
        (ADD, "import os.path as p\nassert [add(k, p.sep) for k in 'a'] == ['a/']", {}, 1.0, None),
        (ADD, "assert add({1}, 2)", {}, 0.0,
         "test 1 of 1: TypeError: unsupported operand type(s) for +: 'set' and 'int'"),
        (ADD, "try:\n    add({1}, 2)\nexcept TypeError:\n    pass", {}, 1.0, None),
        ("def f(x):\n    return {1: (2.5, {3}), 'k': [None, b'4', 1 << 70, 1j]}",
         "assert f(0) == {1: (2.5, {3}), 'k': [None, b'4', 1 << 70, 1j]}", {}, 1.0, None),
        ("def count(n):\n    yield from range(n)", "assert list(count(3)) == [0, 1, 2]", {},
         1.0, None),
        ("def twice(f, x):\n    return f(f(x))", "assert twice(lambda x: x + 1, 5) == 7", {},
         1.0, None),
        ("class Stack:\n    def __init__(self): self.items = []\n"
         "    def push(self, x): self.items.append(x)\n    def pop(self): return self.items.pop()",
         "s = Stack()\ns.push(4)\nassert s.items == [4] and s.pop() == 4", {}, 1.0, None),
        ("def f(x):\n    x.append(1)\n    return x",
         "a = [0]\nassert f(a) == [0, 1] and a == [0]", {}, 1.0, None),
        ("def f(", "assert f(1)", {}, 0.0, "SyntaxError: '(' was never closed (answer.py, line 1)"),
        ("g = 1", "assert f(1)", {}, 0.0, "test 1 of 1: NameError: name 'f' is not defined"),
        ("def f(): raise MemoryError", "f()", {}, 0.0, "memory: more than 256 MiB"),
        ("import os\ndef f(): os._exit(0)", "f()", {}, 0.0, "ended: exit code 0"),
        ("def f(): return 'x' * (17 << 20)", "f()", {}, 0.0,
         "test 1 of 1: ValueError: output: too long a value"),
        ("import time\ntime.sleep(60)", "f()", {"seconds": 0.5}, 0.0, "time: more than 0.5 s"),
        ("print(int(input()) + 1)", [{"input": "1", "output": "2\n"}], {}, 1.0, None),
        ("print(input())", [{"input": "1", "output": "1"}, {"input": "3", "output": "4"}],
         {}, 0.0, "test 2 of 2: wrong output"),
        ("import sys\nprint(2)\nsys.exit(3)", [{"input": "", "output": "2"}], {}, 0.0,
         "test 1 of 1: ended: exit code 3"),
        ("print('x' * 2000)", [{"input": "", "output": ""}], {"output_kb": 1}, 0.0,
         "test 1 of 1: output: more than 1 KiB"),
        ("x = bytearray(1 << 40)", [{"input": "", "output": ""}], {}, 0.0,
         "test 1 of 1: memory: more than 256 MiB"),
    ],
)  # fmt: skip
def test_an_answer_is_worth_what_its_tests_say(code, tests, options, value, reason):
    score = PythonTests(unsafe=True, **options).score(build_sample(code, tests=tests))
    assert (score.value, score.reason) == (value, reason)


def test_a_span_may_hold_the_code():
    sample = Sample(
        id="a",
        problem={"tests": "assert f(1) == 1"},
        turn="answer",
        number=1,
        response="<code>def f(x): return x</code>",
        spans={"code": "def f(x): return x"},
    )
    reward = PythonTests(span="code", unsafe=True)
    assert reward.spans_read() == ("code",)
    assert reward.score(sample).value == 1.0
    assert PythonTests(unsafe=True).score(sample).reason == "no code"


@each_row(
    ("code", "options", "value", "reason"),
    [
        ("echo 7", {"output": "sum"}, 1.0, None),
        ("echo 8", {"output": "sum"}, 0.0, "wrong output"),
        ("exit 3", {}, 0.0, "ended: exit code 3"),
        ("kill -9 $$", {}, 0.0, "time: more than 2 s of processor time, or killed"),
        ("yes", {"output_kb": 1}, 0.0, "output: more than 1 KiB"),
        ("sleep 60", {"seconds": 0.2}, 0.0, "time: more than 0.2 s"),
        ("echo 7", {"command": ["sh", "-c", "cat > a && sh a"], "output": "sum"}, 1.0, None),
        ("", {}, 0.0, "no code"),
    ],
)
def test_a_command_judges_an_answer(code, options, value, reason):
    reward = Command(**{"command": ["sh"], "unsafe": True, **options})
    score = reward.score(build_sample(code, sum="7"))
    assert (score.value, score.reason) == (value, reason)


def test_options_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="the field 'sum' must hold the right output"):
        Command(command=["sh"], output="sum").check_problem({"sum": 7})
    assert "outside of a sandbox" in PythonTests(unsafe=True).warnings()[0]


def test_without_bubblewrap_code_is_refused(monkeypatch, tmp_path):
    from rlx_plugins.code import sandbox

    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    sandbox._find_tool.cache_clear()
    with pytest.raises(OSError, match="install bubblewrap, or set `unsafe: true`"):
        PythonTests().check()
    sandbox._find_tool.cache_clear()
