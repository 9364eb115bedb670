"""A large step becomes columns part by part, and its file has the same bytes as if at once."""

import numpy as np
import pytest
import sampled

from rlx.record import read_step, rollouts
from rlx_registry import read_body, write_body


@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_parts_do_not_show_in_the_file(tmp_path, monkeypatch, at_once):
    trees, rewards, trained = sampled.sampled(40, 30, np.random.default_rng(0))
    assert len(trees) == 5

    def write(name):
        table = rollouts.rollout_table(trees, rewards, trained)
        with_texts = rollouts.add_piece_column(table, trees, sampled.pieces)
        return write_body(tmp_path / name, with_texts)

    whole = write("whole")
    monkeypatch.setattr(rollouts, "AT_ONCE", at_once)
    assert write("parts") == whole
    assert read_step(read_body(tmp_path / "parts")).trees == tuple(trees)
