"""Stands in for lm-eval: asks for log-likelihoods as it does, and leaves results of its form."""

import argparse
import json
import os
from pathlib import Path
from urllib.request import Request, urlopen

parser = argparse.ArgumentParser()
for name in ("model", "tasks", "model_args", "output_path", "limit"):
    parser.add_argument(f"--{name}")
given = parser.parse_args()
assert given.model == "local-completions"
settings = dict(pair.split("=", 1) for pair in given.model_args.split(","))
assert Path(settings["tokenizer"], "tokenizer.json").is_file()
asked = {"model": settings["model"], "prompt": ["1 + 1 = 2", "1 + 1 = 3"], "max_tokens": 1}
asked |= {"echo": True, "logprobs": 1, "temperature": 0, "seed": 1234}
headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
headers["Content-Type"] = "application/json"
with urlopen(Request(settings["base_url"], json.dumps(asked).encode(), headers)) as answered:
    choices = json.load(answered)["choices"]
totals = [sum(c["logprobs"]["token_logprobs"][1:]) for c in choices]
print("what it prints is no result")
results = {
    given.tasks: {
        "alias": given.tasks,
        "acc,none": float(totals[0] > totals[1]),
        "likely,none": totals[0],
    }
}
place = Path(given.output_path, settings["model"].replace("/", "__"))
place.mkdir(parents=True)
samples = {given.tasks: {"original": 9, "effective": int(given.limit)}}
(place / "results_1.json").write_text(json.dumps({"results": results, "n-samples": samples}))
