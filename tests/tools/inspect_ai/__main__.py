"""Asks for a chat message as Inspect does, and leaves a log of its form."""

import argparse
import json
import os
from pathlib import Path
from types import SimpleNamespace
from urllib.request import Request, urlopen

from inspect_ai.scorer import SampleScore
from rlx_inspect import calibration

parser = argparse.ArgumentParser()
parser.add_argument("verb", choices=["eval"])
parser.add_argument("task")
for name in ("model", "log-dir", "log-format", "display", "limit"):
    parser.add_argument(f"--{name}")
given = parser.parse_args()
provider, service, model = given.model.split("/", 2)
assert (provider, service, given.log_format) == ("openai-api", "rlx", "json")
asked = {"model": model, "messages": [{"role": "user", "content": "1 + 1"}], "max_tokens": 4}
headers = {"Authorization": f"Bearer {os.environ['RLX_API_KEY']}"}
headers["Content-Type"] = "application/json"
url = f"{os.environ['RLX_BASE_URL']}/chat/completions"
with urlopen(Request(url, json.dumps(asked).encode(), headers)) as answered:
    assert json.load(answered)["choices"][0]["message"]["role"] == "assistant"
pairs = json.loads(Path(given.task).read_text())
scores = [
    SampleScore(
        sample_id=name,
        score=SimpleNamespace(value="C" if correct else "I", metadata={"confidence": confidence}),
    )
    for name, correct, confidence in pairs
]
figures = {name: {"name": name, "value": value} for name, value in calibration()(scores).items()}
log = {
    "status": "success",
    "eval": {"task": Path(given.task).stem},
    "results": {"completed_samples": len(scores), "scores": [{"name": "own", "metrics": figures}]},
}
place = Path(given.log_dir)
place.mkdir()
(place / "one.json").write_text(json.dumps(log))
