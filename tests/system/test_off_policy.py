"""Rollouts that are one step older than what they train: the same numbers whatever happens."""

import os
import signal
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlx.loss.correction import CorrectionWeights
from rlx.plugin import Problem
from rlx.record import find_run_differences
from rlx.rollout import NO_PARENT, RolloutTree, Segment
from rlx.run import prefetcher
from rlx.run.off_policy import off_policy_figures, staleness_figures
from rlx.run.prefetcher import Prefetcher
from rlx.spec import LossSpec

AHEAD = {
    "phases.0.steps": 4,
    "phases.1.steps": 7,
    "runner.checkpoint.every": 3,
    "evaluation.every": 4,
    "evaluation.problems": 10,
    "rollout.off_policy_steps": 1,
    "rollout.dynamic_sampling": "{max_batches: 2}",
    "optimizer.learning_rate": "1e-2",
    "phases.1.set": "{loss.old_logprobs: learner, loss.correction: {kind: truncate, cap: 1.05}}",
}
PHASES = [range(1, 5), range(5, 12)]
FRESH = [steps[0] for steps in PHASES]


@pytest.fixture(scope="module")
def unbroken(home):
    done = home.rlx("submit", home.yaml, "-q", sets={**home.small, **home.unhurried, **AHEAD})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def begin(home, **changes):
    sets = {**home.small, **home.unhurried, **AHEAD, **changes}
    done = home.rlx("submit", home.yaml, "-qd", "--again", sets=sets)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def unlike(home, one, other):
    with home.registry() as registry:
        return list(find_run_differences(registry, one, other))


def test_what_is_sampled_ahead_is_one_step_old(home, unbroken):
    with home.registry() as registry:
        found = {name: dict(points) for name, points in registry.results.metrics(unbroken).items()}
        bodies = {step: registry.results.rollout_body(unbroken, step) for step in range(1, 12)}
    steps = sorted(found["train/loss"])
    assert steps == sorted(
        s for s, skipped in found["health/skipped_update"].items() if not skipped
    )
    for step, body in bodies.items():
        stale = int(step not in FRESH)
        assert found["sampler/staleness"][step] == stale
        assert body.statistics["sampled_after"] == step - 1 - stale
    mismatch = found["sampler/mismatch_k3"]
    assert all(abs(mismatch[step]) < 1e-9 for step in FRESH)
    assert sum(mismatch[step] > 1e-6 for step in mismatch) >= 5
    assert found["sampler/mismatch_ratio_max"][FRESH[1]] == pytest.approx(1, abs=1e-4)
    assert sorted(found["sampler/correction_mean"]) == list(PHASES[1])
    assert (
        found["sampler/correction_share"][5] == 0 < max(found["sampler/correction_share"].values())
    )


def test_a_stored_run_keeps_its_identities(home, unbroken):
    done = home.rlx("check", unbroken)
    assert done.returncode == 0, done.stdout + done.stderr


def test_stopped_anywhere_and_with_other_checkpoints_it_goes_on_with_what_was_in_flight(
    home, unbroken
):
    run_id = begin(home, **{"runner.checkpoint.every": 0})
    home.stop(run_id, after=5)
    last = home.run(run_id).step
    folder = Path(home.run(run_id).directory) / "checkpoints" / f"step_{last:06d}"
    assert (folder / "in_flight.pickle").exists() == (last + 1 not in FRESH and last < 11)
    assert home.rlx("resume", run_id, "-q").returncode == 0
    assert unlike(home, unbroken, run_id) == []


def test_a_killed_rank_goes_on_with_what_was_in_flight(home, unbroken):
    run_id = begin(home)
    checkpoints = Path(home.run(run_id).directory) / "checkpoints"
    home.until(lambda: (checkpoints / "step_000006").exists(), "a checkpoint")
    for pid in home.ranks(run_id):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    home.until(lambda: home.run(run_id).status == "finished", "it to finish")
    assert unlike(home, unbroken, run_id) == []


def test_two_ranks_draw_the_same_tokens(home, unbroken):
    two = {**home.small, **AHEAD, "runner.ranks": 2}
    done = home.rlx("submit", home.yaml, "-q", "--again", sets=two)
    assert done.returncode == 0, done.stderr
    drawn = []
    for run_id in (unbroken, done.stdout.strip()):
        bodies = {step: trees for step, trees, _ in home.bodies(home.run(run_id))}
        assert sorted(bodies) == list(range(1, 12))
        drawn.append(
            [[s["token_ids"] for s in t["segments"]] for step in (1, 2, 3) for t in bodies[step]]
        )
    assert drawn[0] == drawn[1]


# In one process -----------------------------------------------------------------------------------


def test_what_goes_wrong_in_the_thread_ends_the_run_where_it_is_waited_for():
    progress = SimpleNamespace(show_activity=lambda what: None)
    with Prefetcher(torch.device("cpu")) as ahead:
        assert ahead.take(None, 0) is None
        rollout = SimpleNamespace(off_policy_steps=1)
        recipe = SimpleNamespace(spec=SimpleNamespace(rollout=rollout))
        ahead.begin(SimpleNamespace(progress=progress), recipe, 0, 0, {}, most=1)
        assert ahead.keeps_weights
        with pytest.raises(AttributeError, match="spec"):
            ahead.finish(SimpleNamespace(progress=progress), 1)


def test_steps_ahead_are_begun_once_in_order_and_taken_in_order(monkeypatch):
    """Three steps are begun with the first weights, and one more with each update."""
    begun = []

    def sample(context, recipe, cursor, success):
        begun.append(cursor)
        return cursor

    def collect(context, recipe, cursor, after, success, share):
        assert share == cursor
        return SimpleNamespace(drawn=10, cursor=cursor, after=after)

    monkeypatch.setattr(prefetcher, "sample_first_share", sample)
    monkeypatch.setattr(prefetcher, "collect_rollouts", collect)
    monkeypatch.setattr(prefetcher, "count_drawn_problems", lambda *a: 10)
    monkeypatch.setattr(prefetcher, "synchronize_sampler", lambda *a: pytest.fail("in flight"))
    context = SimpleNamespace(progress=SimpleNamespace(show_activity=lambda what: None))
    recipe = SimpleNamespace(spec=SimpleNamespace(rollout=SimpleNamespace(off_policy_steps=3)))
    taken = []
    with Prefetcher(torch.device("cpu")) as ahead:
        for step in range(1, 8):
            found = ahead.take(context, step - 1) or collect(0, recipe, 0, step - 1, {}, 0)
            taken.append((found.cursor, found.after))
            most = min(7 - step, 3)
            if most:
                ahead.begin(context, recipe, found.cursor + 10, step - 1, {}, most)
            assert not ahead.keeps_weights
            if step < 4:
                ahead.free_sampler(context, step)
                assert ahead.ready == (), "an evaluation need not wait"
            if step == 3:  # as before a checkpoint, from which another process goes on
                ahead.finish(context, step)
                kept = ahead.ready
                assert [one.cursor for one in kept] == [30, 40, 50]
                ahead = Prefetcher(torch.device("cpu"))
                ahead.restore_rollouts(kept)
        assert ahead.take(context, 7) is None
    assert taken == [(0, 0), (10, 0), (20, 0), (30, 0), (40, 1), (50, 2), (60, 3)]
    assert sorted(begun) == [10, 20, 30, 40, 50, 60]


def turn(count, *sampled_after):
    return Segment(
        parent=NO_PARENT,
        author="policy",
        token_ids=(7,) * count,
        turn=1,
        kind="answer",
        logprobs=(-1.0,) * count,
        finish_reason="stop",
        sampled_after=sampled_after,
    )


def test_the_age_of_tokens_is_counted_token_by_token():
    problem = Problem(id="p", prompt="", fields={})
    same = RolloutTree(problem, (turn(3), turn(1)))
    assert staleness_figures([same, same], 5, 3) == {"sampler/staleness": 1}
    assert staleness_figures([], 5, 3) == {}
    mixed = RolloutTree(problem, (turn(4, (3, 2), (1, 4)), turn(2, (2, 3))))
    assert staleness_figures([same, mixed], 5, 3) == {
        "sampler/staleness": pytest.approx((4 * 1 + 3 * 2 + 1 * 0 + 2 * 1) / 10),
        "sampler/staleness_max": 2,
    }


def trained(old, behaviour, correction=None):
    mask = torch.tensor([[False, True, True]])
    return SimpleNamespace(
        streams=SimpleNamespace(old_logprobs=torch.tensor([old])),
        batch=SimpleNamespace(behaviour_logprobs=torch.tensor([behaviour])),
        sampled_mask=mask,
        correction=correction,
    )


def unasked(batch, mask):
    raise AssertionError("the learner has said it already")


def test_mismatch_is_read_off_the_update_unless_the_learner_was_asked():
    first = SimpleNamespace(kl=0.5, token_ratio_max=3.0)
    same = trained([0.0, -1, -1], [0.0, -1, -1])
    assert off_policy_figures(same, LossSpec(), first, unasked) == {
        "sampler/mismatch_k3": 0.5,
        "sampler/mismatch_ratio_max": 3,
    }
    without_signal = off_policy_figures(
        same, LossSpec(), None, lambda batch, mask: torch.tensor([[9.0, 0, -1]])
    )
    assert without_signal == {
        "sampler/mismatch_k3": pytest.approx((2.718282 - 2) / 2),
        "sampler/mismatch_ratio_max": pytest.approx(2.718282),
        "sampler/mismatch_row_ratio_max": pytest.approx(2.718282),
    }
    asked, half = LossSpec(old_logprobs="learner"), CorrectionWeights(torch.ones(1, 3), 0.75, 0.5)
    found = off_policy_figures(trained([9.0, -1, 0], [0.0, -1, -1], half), asked, first, unasked)
    assert found == {
        "sampler/mismatch_k3": pytest.approx((2.718282 - 2) / 2),
        "sampler/mismatch_ratio_max": pytest.approx(2.718282),
        "sampler/mismatch_row_ratio_max": pytest.approx(2.718282),
        "sampler/correction_mean": 0.75,
        "sampler/correction_share": 0.5,
    }
