"""Runs whose rollouts are those of a program, beside the same game as an environment."""

import shutil
import signal

import guests
import pytest
from engines import needs_vllm
from patience import signal_processes

GUESS = guests.ROOT / "plugins" / "rlx-guess"
SMALL = {
    "model.warm_start.steps": 60,
    "model.hidden_size": 32,
    "rollout.prompts_per_step": 4,
    "rollout.num_generations": 4,
    "phases.0.steps": 4,
    "runner.checkpoint.every": 1,
    "evaluation.problems": 8,
}


@pytest.fixture(scope="module")
def home(own_home):
    own_home.add_plugins("rlx-guess")
    for name in ("agent.yaml", "agent.py"):
        shutil.copy(GUESS / name, own_home.folder / name)
    return own_home


def submit(home, spec, *options, **sets):
    done = home.rlx("submit", spec, "-q", *options, sets={**SMALL, **sets})
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


@pytest.fixture(scope="module")
def unbroken(home):
    return submit(home, "agent.yaml", **home.hold_turns("*"))


def list_values(home, run):
    """What is recorded of a run, but for the kinds of turns: every token, log-probability, reward,
    advantage, weight and score, and the metrics over all turns."""
    told = ("token_ids", "behaviour_logprobs", "text", "spans", "hull", "seed", "finish_reason")
    found = []
    for step, trees, _ in home.bodies(home.run(run)):
        for tree in trees:
            turns = [one for one in tree["segments"] if one["author"] == "policy"]
            rows = [
                {k: row[k] for k in row if k not in ("kind", "segment")} for row in tree["rows"]
            ]
            rewards = [
                [
                    (one["name"], one["raw"], one["weight"])
                    for one in given or ()
                    if one["status"] != "absent"
                ]
                for turn in turns
                for given in (turn["rewards"], turn["global_rewards"])
            ]
            found.append((step, rows, rewards, [[turn[k] for k in told] for turn in turns]))
    with home.registry() as registry:
        metrics = {
            name: points
            for name, points in registry.results.metrics(run).items()
            if name.startswith(("train/", "eval/", "score/", "rollout/turns", "sampler/"))
            and not name.endswith((*KINDS, "_std"))
        }
    return found, metrics


KINDS = ("_turn", "_guess", "_unclear", "_kg_query", "_answer", "_invalid")


def test_the_agent_learns_what_the_environment_teaches(home):
    """Every value, to the last bit, at the same seeds."""
    sets = {"model.warm_start.batch_size": 16, "evaluation.variants": "{}", "phases.0.steps": 2}
    folder = guests.ROOT / "experiments"
    runs = [submit(home, folder / name, **sets) for name in ("kg_agent.yaml", "kg.yaml")]
    mine, theirs = (list_values(home, run) for run in runs)
    assert mine == theirs
    assert len(mine[1]["train/loss"]) == 2
    rows = [row for _, rows, *_ in mine[0] for row in rows]
    assert {bool(value) for row in rows for value in row["advantages"]} == {False, True}
    scored = {}
    for name, raw, _ in (one for tree in mine[0] for given in tree[2] for one in given):
        scored.setdefault(name, set()).add(raw)
    assert scored["is_answer_score"] == {0.0, 1.0}
    assert len(scored) == 7


def test_two_ranks_run_the_programs_that_one_runs(home, unbroken):
    """In the first step, with the same weights: every token, reward and, up to sums, metric."""
    sets = {**home.hold_turns("*"), "runner.ranks": 2, "phases.0.steps": 1}
    shared = submit(home, "agent.yaml", **sets)
    (mine, figures), (theirs, known) = (list_values(home, run) for run in (shared, unbroken))
    assert len(mine) == 4
    for (_, rows, rewards, turns), other in zip(mine, theirs, strict=False):
        assert rewards == other[2]
        assert [row["advantages"] for row in rows] == [row["advantages"] for row in other[1]]
        assert [tokens for tokens, *_ in turns] == [tokens for tokens, *_ in other[3]]
    first = {name: points[0][1] for name, points in figures.items()}
    assert first == pytest.approx({name: known[name][0][1] for name in first}, rel=1e-4, abs=1e-6)


def test_a_run_that_is_killed_among_sessions_goes_on(home, unbroken):
    run = submit(home, "agent.yaml", "-d", "--again", **home.hold_turns("*"))
    ranks = home.await_ranks(run)
    home.until(lambda: home.run(run).step >= 1, "it to train")
    home.hold()  # or it could be over
    signal_processes(ranks, signal.SIGKILL)
    home.release()
    home.until(lambda: home.run(run).status == "finished", "it to finish")
    assert home.run(run).attempt == 2
    assert home.differences(unbroken, run) == []
    home.until(lambda: not home.processes(), "every process to end")
    checked = home.rlx("check", run)
    assert checked.returncode == 0, checked.stdout
    assert "all identities hold" in checked.stdout


FORKING = '''
from agent import post

def play(problem, base_url, api_key):
    """Three first guesses, and two after the second of them."""
    messages = [{"role": "user", "content": problem["prompt"]}]
    for count in (3, 2):
        body = {"model": "m", "messages": messages, "n": count}
        reply = post(f"{base_url}/chat/completions", api_key, body)
        for number, choice in enumerate(reply["choices"]):
            value = sum(map(ord, choice["message"]["content"])) % 7 < 3
            report = {"turn": [reply["id"], number], "sensible": value}
            post(f"{base_url}/info", api_key, report)
        said = reply["choices"][1]["message"]
        messages += [said, {"role": "user", "content": "+\\n"}]
    post(f"{base_url}/info", api_key, {"found": True})
'''


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=needs_vllm)])
def test_an_agent_that_forks_its_history_trains(home, engine):
    (home.folder / "forking.py").write_text(FORKING)
    home.add_path(home.folder)
    other = "{rollout.schedule: agent, rollout.function: forking.py:play, rollout.max_turns: 5}"
    sets = {"phases.0.set": other, "phases.0.steps": 2, "estimator": "{name: grpo}"}
    sets |= {} if engine == "transformers" else {"sampler": "{engine: vllm, kv_cache_mb: 32}"}
    run = submit(home, "agent.yaml", **sets)
    for _, trees, _ in home.bodies(home.run(run)):
        assert len(trees) == 4
        for tree in trees:
            authors = [one["author"] for one in tree["segments"]]
            assert authors == ["prompt", *4 * ["policy", "policy", "prompt", *3 * ["policy"]]]
            levels = [one["turn"] for one in tree["segments"]]
            assert levels == [0, *4 * [1, 1, 0, 2, 2, 1]]
    figures = home.metrics(run)
    assert all(value > 0 for _, value in figures["train/grad_norm"])
    assert all(value <= 5e-5 for _, value in figures.get("sampler/drift", []))
    assert "all identities hold" in home.rlx("check", run).stdout
