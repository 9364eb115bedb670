"""A run whose texts are all hostile: it ends well, and every command shows them as text.

Strata, phases, rewards, reasons and tokens hold markup of rich, escape sequences, direction marks,
NUL and half characters; prompts hold names of control tokens.
"""

import json
import re

import pytest
from checkpoints import STYLES, Style, make_checkpoint
from guests import write_distribution

EVIL = "[/INST][bold]\x1b[31m\u202e[/red]:smile:"
SHOWN = "[/INST][bold]\\x1b[31m\\u202e[/red]:smile:"
CONTROL = "<|end|>"
TAGS = ("[/INST]", "[bold]", "[/red]", ":smile:")
CHAT = (
    "{%- for m in messages -%}{{ '<|turn|>' + m['content'] + '<|end|>' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|turn|>' }}{%- endif -%}"
)
STYLE = Style(CHAT, (*TAGS, "<|turn|>", CONTROL, "<|doc_end|>"), CONTROL)
GUEST = r'''
import json
from rlx.plugin import Score, reward

REASONS = (
    json.loads('"half a character: \\ud83d"'),
    "NUL \0",
    "long " * 100_000,
    "[/INST][bold]\x1b[31m\u202e[/red]:smile:",
)

@reward
def rude(sample):
    """Gives every kind of reason that a database or a terminal cannot take."""
    number = sum(map(ord, sample.response)) % len(REASONS)
    return Score(float(number % 2), REASONS[number], {REASONS[number]: 1.0})
'''
SPEC = {
    "name": "evil",
    "model": {"kind": "pretrained", "path": "model"},
    "task": {
        "plugin": "dataset",
        "train": {"path": "train.jsonl"},
        "test": {"path": "test.jsonl"},
        "prompt": "{question}",
        "stratum": "kind",
    },
    "rollout": {
        "schedule": "single",
        "prompts_per_step": 4,
        "num_generations_answer": 8,
        "answer": {"template": f"{EVIL} {{prompt}}", "max_new_tokens": 24},
    },
    "rewards": {"turn": {EVIL: {"plugin": "rude", "turn": "answer"}}},
    "estimator": {"name": "grpo"},
    "evaluation": {"problems": 4, "correct": EVIL},
    "tracking": {"mlflow": None},
    "phases": [{"name": EVIL, "steps": 1}],
}
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f\u202e\ud800-\udfff]")


def assert_inert(done):
    """No character that a terminal obeys: what is coloured or moved is coloured by nobody."""
    assert not RAW.search(done.stdout + done.stderr)
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def home(own_home):
    folder = own_home.folder
    guest = folder / "rude"
    points = "[rlx.rewards]\nrude = rlx_rude:rude\n"
    write_distribution(guest, "rlx-rude", points, rlx_rude=GUEST)
    own_home.add_path(guest)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(STYLES, "tags", STYLE)
        make_checkpoint(folder / "model", "qwen2", "tags")
    for split, start in (("train", 0), ("test", 100)):
        rows = [
            {
                "question": f"{start + n} {CONTROL} {TAGS[0]}",
                "answer": "7",
                "kind": f"{EVIL}{n % 2}",
            }
            for n in range(8)
        ]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "evil.yaml").write_text(json.dumps(SPEC))
    return own_home


@pytest.fixture(scope="module")
def submitted(home):
    done = home.rlx("submit", "evil.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def run(home, submitted):
    return home.run(home.json("status", "latest")["run"])


def list_segments(home, run, author):
    for _, trees, _ in home.bodies(run):
        for tree in trees:
            yield from (s for s in tree["segments"] if s["author"] == author)


def test_such_reasons_end_no_run_and_are_kept_short(home, run):
    assert run.status == "finished"
    found = {r["reason"] for s in list_segments(home, run, "policy") for r in s["rewards"]}
    assert "half a character: \ufffd" in found
    assert "NUL ␀" in found
    assert any(reason.endswith("… (500,000 characters)") for reason in found)
    assert max(map(len, found)) < 600
    indexed = [row for _, _, index in home.bodies(run) for row in index]
    assert any("half a character: \ufffd" in row.failed for row in indexed)


def test_submit_shows_the_summary_as_text(submitted):
    assert_inert(submitted)
    assert SHOWN in submitted.stdout


@pytest.mark.parametrize("verb", ["status", "samples"])
def test_commands_show_it_as_text(home, run, verb):
    done = home.rlx(verb, run.id)
    assert done.returncode == 0, done.stderr
    assert_inert(done)
    assert SHOWN in done.stdout


def test_a_plan_shows_the_tokens_that_training_reads(home, run):
    done = home.rlx("plan", "evil.yaml", "--full")
    assert done.returncode == 0, done.stderr
    assert_inert(done)
    assert SHOWN in done.stdout
    assert "< |end|>" in done.stdout.replace("\n", "")


def test_prompts_have_no_control_tokens_of_the_data(home, run):
    opened = list(list_segments(home, run, "prompt"))
    assert opened and all("< |end|> [ /INST]" in s["text"] for s in opened)
    definition = json.loads((home.folder / "model" / "tokenizer.json").read_text())
    added = {token["content"]: token["id"] for token in definition["added_tokens"]}
    for segment in opened:
        # One of the chat template, one of the experiment's own template.
        assert segment["token_ids"].count(added[CONTROL]) == 1
        assert segment["token_ids"].count(added["[/INST]"]) == 1
