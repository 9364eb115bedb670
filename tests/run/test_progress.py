"""What a run shows of how far it is."""

from run_homes import RLCR, SMALL

from rlx.progress import ProgressFile


def test_an_evaluation_moves_while_it_samples(own_home, monkeypatch):
    shown = []
    monkeypatch.setattr(ProgressFile, "show", lambda self, progress: shown.append(progress))
    own_home.submit(RLCR, {**SMALL, "sampler.max_rows": 8})
    for label in ("before", "after"):
        done = [p.done for p in shown if p.stage == f"evaluation ({label})"]
        assert done == sorted(done) and (done[0], done[-1]) == (0, 30)
        assert len({*done}) > 6, "30 answers and 30 confidences, at most 8 at a time"
