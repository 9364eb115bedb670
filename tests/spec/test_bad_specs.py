"""Every file under bad/ and what rlx says about it.

To add a case, drop `NAME.yaml` into bad/, run `RLX_ACCEPT=1 pytest tests/spec/test_bad_specs.py`,
and read the `NAME.txt` that appears before believing it. Lines `# --set ...` at the top of a file
are its overrides.
"""

import os
from pathlib import Path

import pytest

from rlx.spec.diagnostic import InvalidSpec
from rlx.spec.reader import read_spec

BAD = Path(__file__).parent / "bad"
CASES = sorted(path.stem for path in BAD.glob("*.yaml"))


def overrides(text):
    return [line[8:] for line in text.splitlines() if line.startswith("# --set ")]


def test_there_are_cases():
    assert len(CASES) >= 15
    assert {path.stem for path in BAD.glob("*.txt")} <= set(CASES)


@pytest.mark.parametrize("case", CASES)
def test_says_what_is_wrong(case, monkeypatch):
    monkeypatch.chdir(BAD)
    path = Path(f"{case}.yaml")
    with pytest.raises(InvalidSpec) as caught:
        read_spec(path, overrides(path.read_text(encoding="utf-8")))
    said = str(caught.value) + "\n"
    expected = Path(f"{case}.txt")
    if os.environ.get("RLX_ACCEPT") == "1" and not expected.exists():
        expected.write_text(said, encoding="utf-8")
    assert said == expected.read_text(encoding="utf-8")
    assert caught.value.exit_code == 2
