"""An agent that plays the game over OpenAI's interface, with nothing but Python's own library."""

import json
import urllib.request

TURNS, PATIENCE = 3, 2


def post(url, key, body):
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        return json.loads(response.read() or "null")


def play(problem, base_url, api_key):
    low, high, secret = (problem["fields"][name] for name in ("low", "high", "secret"))
    messages, wasted = [{"role": "user", "content": problem["prompt"]}], 0
    for turn in range(1, TURNS + 1):
        body = {"model": "policy", "messages": messages}
        reply = post(f"{base_url}/chat/completions", api_key, body)["choices"][0]["message"]
        said = reply["content"].rpartition("</answer>")[0].rpartition("<answer>")[2].strip()
        guess = int(said) if said.isascii() and said.isdigit() and len(said) < 10 else None
        wasted += guess is None
        found, sensible = guess == secret, guess is not None and low <= guess <= high
        seen = {} if guess is None else {"guess": guess}
        report = {"turn": turn, **seen, "found": found, "sensible": sensible, "wasted": wasted}
        post(f"{base_url}/info", api_key, report)
        if found or wasted == PATIENCE:
            return
        answer = "?\n" if guess is None else "+\n" if guess < secret else "-\n"
        if guess is not None:
            low = max(low, guess + 1) if guess < secret else low
            high = min(high, guess - 1) if guess > secret else high
        messages += [reply, {"role": "user", "content": answer}]
