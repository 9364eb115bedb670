"""Where ranks keep the kernels that torch compiles: longer than an attempt."""

import os
from pathlib import Path

import pytest
from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir

from rlx.launch.rank import KERNELS, keep_compiled_kernels


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(KERNELS, "")  # so that it is as before in the end
    monkeypatch.delenv(KERNELS)
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    return tmp_path / "cache" / "rlx" / "inductor"


def test_kernels_are_in_the_cache_of_the_machine_or_where_the_user_chose(
    cache, tmp_path, monkeypatch
):
    keep_compiled_kernels()
    assert cache_dir() == str(cache)
    assert Path(triton_cache_dir(0)).is_relative_to(cache)
    monkeypatch.setenv(KERNELS, str(tmp_path / "mine"))
    keep_compiled_kernels()
    assert cache_dir() == str(tmp_path / "mine")


def test_without_a_cache_that_can_be_written_torch_chooses(cache):
    cache.parents[1].touch()  # a file is where the folder should be
    keep_compiled_kernels()
    assert KERNELS not in os.environ
