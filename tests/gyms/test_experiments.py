"""The experiments that docs/gyms.md reports are experiments that rlx takes."""

import json
import zlib
from pathlib import Path

import yaml
from gyms_installed import need_library

need_library("reasoning_gym")
need_library("textarena")

ROOT = Path(__file__).parents[2]


def test_demonstrations_in_a_file_show_no_held_out_prompt():
    experiment = yaml.safe_load((ROOT / "experiments" / "gyms" / "reversal.yaml").read_text())
    shown = experiment["model"]["warm_start"]["demonstrations"]
    rows = (ROOT / shown["train"]["path"]).read_text().splitlines()
    prompts = {shown["prompt"].format(**json.loads(row)) for row in rows}
    assert len(prompts) > 100
    assert not [p for p in prompts if zlib.crc32(p.encode()) % 5 == 0]
