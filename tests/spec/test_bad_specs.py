"""Every file under bad/ and what rlx says about it.

To add a case, drop `NAME.yaml` into bad/, run `RLX_ACCEPT=1 pytest tests/spec/test_bad_specs.py`,
and read the `NAME.txt` that appears before believing it. Lines `# --set ...` at the top of a file
are its overrides.
"""

import os
import re
from pathlib import Path

import pytest

from rlx.plan import check_file
from rlx.spec.reading.diagnostics import InvalidSpec, label_refusal
from rlx.spec.reading.yaml_source import MAX_BYTES

BAD = Path(__file__).parent / "bad"
CASES = sorted(path.stem for path in BAD.glob("*.yaml"))
ONLY_PLUGINS_AT_FAULT = {"environment_unknown", "plugin_missing", "plugin_of_another_kind"}


def overrides(case):
    text = (BAD / f"{case}.yaml").read_text(encoding="utf-8", errors="replace")
    return [line[8:] for line in text.splitlines() if line.startswith("# --set ")]


def everywhere(text):
    """A report without what differs between installations."""
    text = re.sub(r"note: \d+ installed: .*", "note: N installed: ...", text)
    text = re.sub(r"(entry-point group '[a-z.]+' in) .*", r"\1 PREFIX", text)
    return re.sub(r"\(rlx [0-9.]+\)", "(rlx VERSION)", text)


def test_says_what_is_wrong(monkeypatch, subtests):
    for case in CASES:
        with subtests.test(case=case), monkeypatch.context() as monkeypatch:
            monkeypatch.chdir(BAD)
            with pytest.raises(InvalidSpec) as caught, label_refusal("submitted"):
                check_file(Path(f"{case}.yaml"), overrides(case))
            said = everywhere(str(caught.value)) + "\n"
            expected = Path(f"{case}.txt")
            if os.environ.get("RLX_ACCEPT") == "1" and not expected.exists():
                expected.write_text(said, encoding="utf-8")
            assert said == expected.read_text(encoding="utf-8")
            assert all(len(line) < 400 for line in said.splitlines())
            assert caught.value.exit_code == (3 if case in ONLY_PLUGINS_AT_FAULT else 2)


def test_a_file_of_50_mb_is_refused_unread(tmp_path, subtests):
    for beginning in (b"name: x\n", b"[" * 4096, b"a: &a [*a]\n"):
        with subtests.test(beginning=beginning):
            path = tmp_path / "huge.yaml"
            with path.open("wb") as stream:
                stream.write(beginning)
                stream.truncate(50 * 2**20)
            with pytest.raises(InvalidSpec, match=f"larger than {MAX_BYTES // 1024} KiB"):
                check_file(path)
