"""The engine of `sampler: {engine: auto}`: examples, what cannot turn it, and how it is read."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlx.checks import SamplingCase, check_file, choose_engine, read_spec, sampler_choice
from rlx.cli import main
from rlx.errors import EnvironmentFault
from rlx.launch.devices import NvidiaDriver, TorchBuild
from rlx.launch.packages import Package
from rlx.model import build_policy
from rlx.sampler import open_sampler, require_engine
from rlx.spec import ExperimentSpec, TinyModelSpec
from rlx.spec.reading import InvalidSpec
from rlx.trial import (
    GPUS,
    LevelTokens,
    ModelShape,
    SamplingWork,
    estimate_sampling_seconds,
    list_expected_levels,
    load_model_shape,
)

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
SIZES = ("0.5B", "1.5B", "3B", "7B")
CPU, CUDA = TorchBuild("2.13.0+cpu", None), TorchBuild("2.13.0", "13.0")
H100 = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aa11)\n"
INSTALLED = Package("vllm", "==0.32.0", "vllm", "0.32.0", fits=True)


def shape_of(size) -> ModelShape:
    model = read_spec(
        EXPERIMENTS / "rlcr_1.5b.yaml", [f"model.path=Qwen/Qwen2.5-{size}"]
    ).spec.model
    shape = load_model_shape(model)
    assert shape is not None
    return shape


SHAPES = {size: shape_of(size) for size in SIZES}


def level(turns, openings, opening, at_most):
    sizes = {"turns": turns, "openings": openings, "opening": opening, "at_most": at_most}
    return LevelTokens(kind="turn", made_up=at_most / 2, **sizes)


def tree(prompts, prompt, *forks):
    """Levels of (turns below each of the level before, limit); questions have 64 tokens."""
    levels, above = [], prompts
    for number, (count, limit) in enumerate(forks):
        levels.append(level(above * count, above, 64 if number else prompt, limit))
        above *= count
    return tuple(levels)


def sampling(size, levels, ranks, rows, filled=0.5):
    return SamplingWork(
        shape=SHAPES[size], levels=levels, ranks=ranks, max_rows=rows, filled=filled
    )


def choose(size, levels, ranks, rows, **more):
    work = sampling(size, levels, ranks, rows)
    return choose_engine(
        SamplingCase(**{"gpu": "H100", "works": ((1, work),), "cache_bytes": 17e9} | more)
    )


DIALOGUE = tree(128, 512, (16, 256), *[(1, 256)] * 6)
HOTPOT = tree(64, 1800, (16, 1024), (4, 512))
SHORT = tree(64, 512, (8, 1024), (4, 256))
LONG = tree(64, 512, (16, 8192))


@pytest.mark.parametrize(
    ("what", "size", "levels", "ranks", "rows", "engine"),
    [
        ("deep trees of long prompts", "1.5B", HOTPOT, 1, 512, "transformers"),
        ("the same, several at a time", "7B", HOTPOT, 8, 512, "transformers"),
        ("two turns of a short prompt", "1.5B", SHORT, 1, 512, "transformers"),
        ("one batch of short answers", "7B", tree(32, 512, (8, 512)), 1, 512, "transformers"),
        ("long answers, many batches", "1.5B", LONG, 1, 256, "vllm"),
        ("long answers of 7 B", "7B", tree(256, 512, (16, 4096)), 8, 128, "vllm"),
        ("long dialogues of 7 B, few at a time", "7B", DIALOGUE, 8, 48, "vllm"),
        ("too short to send weights for", "7B", tree(8, 512, (8, 64)), 1, 16, "transformers"),
    ],
)  # fmt: skip
def test_worked_examples(what, size, levels, ranks, rows, engine):
    assert choose(size, levels, ranks, rows).engine == engine, what


def test_the_times_are_those_that_were_judged():
    """Without a GPU: 34 s beside vLLM's 39 on HotpotQA, 75 with 128 rows at a time; on flat groups
    1.5 to 2 times slower than others."""
    gpu = GPUS["H200"]
    hotpot = sampling("1.5B", HOTPOT, 1, 512)
    own, theirs = (estimate_sampling_seconds(hotpot, gpu, e) for e in ("transformers", "vllm"))
    assert 1.0 < theirs / own < 1.2 and 34 / 2 < own < 34 * 2 and 39 / 2 < theirs < 39 * 2
    few = estimate_sampling_seconds(replace(hotpot, max_rows=128), gpu)
    assert 1.8 < few / own < 2.6
    flat = sampling("1.5B", LONG, 1, 256)
    own, theirs = (estimate_sampling_seconds(flat, gpu, e) for e in ("transformers", "vllm"))
    assert 1.3 < own / theirs < 2


def test_one_level_by_hand():
    """A prompt of 100 tokens, 4 turns of up to 10 tokens, two at a time, on a GPU of 1 kB/s."""
    shape = replace(SHAPES["1.5B"], layers=1, hidden=0, small=0, vocabulary=0, heads=1, kv_heads=1)
    shape = replace(shape, head_dim=1, intermediate=0)
    assert shape.parameters == 0
    gpu = replace(GPUS["H100"], bandwidth=1e3)
    work = SamplingWork(shape=shape, levels=tree(1, 100, (4, 10)), ranks=1, max_rows=2, filled=0.5)
    assert work.token == 4  # bytes: a key and a value of one bfloat16 each
    writing, written, host = 10 / 3, 4 * 5, 1e-5
    read = 4 / 600
    own = 20 * (1e-4 + 100 / 2 * read) + written * (host + writing * read)
    assert estimate_sampling_seconds(work, gpu) == pytest.approx(own)
    read = 4 / 800
    theirs = 2 + 10 * (0.5 * 2 + 0.5) * 8e-5 + written * (host + (100 + writing) * read)
    assert estimate_sampling_seconds(work, gpu, "vllm") == pytest.approx(theirs)
    few = estimate_sampling_seconds(work, gpu, "vllm", cache_bytes=4 * (25 + writing))
    assert few - theirs == pytest.approx(10 * 0.5 * 2 * 8e-5)  # one row at a time: four waves
    assert work.sharing == pytest.approx(4)


counts = st.integers(1, 32)
trees = st.builds(
    lambda prompts, prompt, forks: (prompts, prompt, tuple(forks)),
    st.integers(1, 256),
    st.integers(1, 4096),
    st.lists(st.tuples(counts, st.integers(1, 4096)), min_size=1, max_size=3),
)


@given(trees, st.sampled_from(SIZES), st.sampled_from([1, 4]), st.integers(1, 1024), st.data())
def test_deeper_sharing_never_turns_to_vllm(drawn, size, ranks, rows, data):
    """The same rows with fewer, or longer, contexts above them."""
    levels = tree(*drawn[:2], *drawn[2])
    before = choose(size, levels, ranks, rows, cache_bytes=float("inf")).engine
    number = data.draw(st.integers(0, len(levels) - 1))
    one = levels[number]
    if one.turns == one.openings:  # a dialogue that goes on shares nothing
        return
    changed = replace(
        one,
        openings=data.draw(st.integers(1, one.openings)),
        opening=one.opening + data.draw(st.integers(0, 4096)),
    )
    if changed.openings != one.openings:
        changed = replace(changed, opening=one.opening)
    deeper = (*levels[:number], changed, *levels[number + 1 :])
    after = choose(size, deeper, ranks, rows, cache_bytes=float("inf")).engine
    assert (before, after) != ("transformers", "vllm")


@given(trees, st.sampled_from(SIZES), st.integers(1, 64))
def test_more_steps_of_a_flat_group_never_turn_from_vllm(drawn, size, times):
    prompts, prompt, forks = drawn
    flat, many = (tree(prompts * n, prompt, forks[0]) for n in (1, times))
    rows = prompts * forks[0][0]  # all rows of the smaller one
    engines = [choose(size, levels, 1, rows, cache_bytes=1e15).engine for levels in (flat, many)]
    assert engines != ["vllm", "transformers"]


@given(trees, st.sampled_from(SIZES), st.booleans(), st.booleans())
def test_no_engine_is_chosen_that_cannot_be_used_if_the_other_can(drawn, size, own, theirs):
    lacks = {"transformers": "no room"} if own else {}
    lacks |= {"vllm": "no vLLM"} if theirs else {}
    choice = choose(size, tree(*drawn[:2], *drawn[2]), 1, 256, lacks=lacks)
    assert choice.engine not in lacks or (own and theirs)
    assert all(lack in choice.reason for lack in lacks.values()) or choice.engine not in lacks


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({"gpu": ""}, "the run is on the CPU"),
        ({"gpu": "", "lacks": {"transformers": "no room"}}, "the run is on the CPU"),
        (
            {"gpu": "NVIDIA Z9"},
            "the speed of a NVIDIA Z9 is not known, so no times can be compared",
        ),
        ({"gpu": "H100"}, "the model's dimensions are not known, so no times can be compared"),
    ],
)
def test_without_times_it_is_transformers_and_says_so(case, reason):
    assert str(choose_engine(SamplingCase(**case))) == f"transformers, because {reason}"


def test_the_reason_names_both_times_and_what_is_lacking():
    assert str(choose("7B", DIALOGUE, 8, 48)) == (
        "vllm, because a step's sampling is expected to take 113 s with transformers and 65 s with "
        "vllm on a rank's H100, within a factor of two; 1.8 rows share a token of context"
    )
    lacking = choose("7B", DIALOGUE, 8, 48, lacks={"vllm": "vLLM is not installed"}, assumed=True)
    assert lacking.engine == "transformers"
    assert lacking.reason.startswith("vLLM is not installed (a step's sampling is expected to")
    assert "H100 (no GPU is seen here)" in lacking.reason
    crowded = choose("1.5B", HOTPOT, 1, 512, lacks={"transformers": "it holds 90 GiB"})
    assert crowded.engine == "vllm" and crowded.reason.startswith("it holds 90 GiB (")
    either = {"vllm": "none is installed", "transformers": "it holds 90 GiB"}
    neither = choose("7B", DIALOGUE, 8, 48, lacks=either)
    assert str(neither) == (
        "transformers, because neither engine can be used: none is installed and it holds 90 GiB"
    )
    slight = choose("1.5B", tree(64, 512, (16, 1024), (4, 512)), 1, 512).reason
    assert slight.endswith("; only transformers resumes with the same tokens")


# As it is read -----------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch):
    """A machine with one H100 and vLLM; returns what changes it."""

    def change(*, build=CUDA, listing=H100, vllm=INSTALLED):
        driver = NvidiaDriver(listing or None, bool(listing), "13.0")
        monkeypatch.setattr(sampler_choice, "torch_build", lambda: build)
        monkeypatch.setattr(sampler_choice, "query_nvidia_driver", lambda: driver)
        monkeypatch.setattr(sampler_choice, "list_packages", lambda: {"vllm": vllm} if vllm else {})
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    change()
    return change


def read(name, *overrides):
    return read_spec(EXPERIMENTS / f"{name}.yaml", ["sampler.engine=auto", *overrides])


def test_it_is_resolved_when_it_is_read(machine):
    found = read("kg_7b")
    assert (found.spec.sampler.engine, found.spec.sampler.max_rows) == ("vllm", 48)
    assert found.choices["sampler"].startswith("vllm, because a step's sampling is expected to")
    assert found.origins["sampler.engine"] == "--set (auto)"
    assert found.origins["sampler.gpu_memory_utilization"] == "default"
    assert found.spec.digest == read("kg_7b", "sampler.engine=vllm").spec.digest
    assert read("kg_7b", "sampler.engine=vllm").choices == {}
    for profile, engine in (("rlcr_1.5b", "transformers"), ("kg_7b", "vllm")):  # with its defaults
        unset, written = (read(profile, f"sampler={{engine: {e}}}") for e in ("auto", engine))
        assert unset.spec.sampler.engine == engine
        assert unset.spec.digest == written.spec.digest
    own = read("rlcr_1.5b")
    assert own.spec.sampler.engine == "transformers"
    assert own.spec.digest == read_spec(EXPERIMENTS / "rlcr_1.5b.yaml").spec.digest


@pytest.mark.parametrize(
    ("changes", "overrides", "reason"),
    [
        ({"build": CPU}, ["runner.device=auto"], "the run is on the CPU"),
        ({"listing": ""}, ["runner.device=auto"], "the run is on the CPU"),
        ({"build": TorchBuild("2.13.0", "14.1")}, ["runner.device=auto"], "the run is on the CPU"),
        ({"build": TorchBuild("2.13.0+rocm7", None, "7.0")}, [], "the speed of a GPU of AMD"),
        ({}, ["runner.device=cpu", "runner.dtype=float32"], "the run is on the CPU"),
        ({"vllm": None}, [], "vLLM is not installed: pip install 'rlx[vllm]' (a step's"),
        ({"vllm": replace(INSTALLED, installed="0.9.0", fits=False)}, [],
         "vLLM 0.9.0 is installed, and rlx needs vllm==0.32.0 (a step's"),
        ({"listing": H100.replace("H100", "Z9")}, [], "the speed of a NVIDIA Z9 80GB HBM3 is not"),
        ({}, ["rollout.turn.temperature=0.005"], "vLLM allows no temperature below 0.01 (a step's"),
        ({}, ["model.path=some/model"], "the model's dimensions are not known"),
    ],
)  # fmt: skip
def test_what_turns_a_vllm_profile_to_transformers(machine, changes, overrides, reason):
    machine(**changes)
    found = read("kg_7b", *overrides)
    assert found.spec.sampler.engine == "transformers"
    assert found.choices["sampler"].startswith(f"transformers, because {reason}")


def test_an_engine_whose_plan_does_not_fit_is_not_chosen(machine):
    crowded = read("kg_3b", "runner.ranks=1", "sampler.max_rows=32").choices["sampler"]
    assert crowded.startswith("transformers, because a rank is planned to hold ")
    assert "GiB while vllm samples, and the GPU has 78 (a step's" in crowded
    large = ("model.path=Qwen/Qwen2.5-32B", "runner.ranks=16", "runner.zero_stage=3")
    huge = read("kg_7b", *large).choices["sampler"]
    assert "vLLM's share of the GPU's memory cannot hold the weights" in huge
    assert huge.startswith("transformers, because ")
    many = read("rlcr_1.5b", "sampler.max_rows=2048", "rollout.answer.max_new_tokens=2048")
    assert many.spec.sampler.engine == "vllm"
    lack = "GiB while transformers samples, and the GPU has 78 (a step's"
    assert lack in many.choices["sampler"]
    machine(listing="")  # another GPU may be larger
    assert "is planned to hold" not in read("kg_3b", "runner.ranks=1").choices["sampler"]


def test_no_gpu_here_is_taken_for_an_h100_elsewhere(machine):
    machine(listing="")
    found = read("kg_7b")
    assert found.spec.sampler.engine == "vllm"
    assert "H100 (no GPU is seen here)" in found.choices["sampler"]


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("A100-SXM4-40GB", "A100-SXM4-40GB"),
        ("A100-SXM4-80GB", "A100"),
        ("H200", "H200"),
        ("GH200 480GB", "NVIDIA GH200 480GB"),
        ("GeForce RTX 4090", "4090"),
        ("GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 Laptop GPU"),
    ],
)
def test_the_largest_name_that_fits_a_gpu_is_its(machine, name, gpu):
    machine(listing=H100.replace("H100 80GB HBM3", name))
    assert sampler_choice._find_gpu(read("kg_7b").spec.runner) == (gpu, False)


@pytest.mark.parametrize(
    ("flat", "deep", "engine"),
    [(1, 0, "vllm"), (0, 1, "transformers"), (9, 1, "vllm"), (1, 90, "transformers")],
)
def test_phases_count_by_their_steps(machine, flat, deep, engine):
    machine(listing="")
    single = "{rollout.schedule: single, rollout.answer.max_new_tokens: 4096}"
    phases = [f"{{name: flat, steps: {flat}, set: {single}}}"] * bool(flat)
    phases += [f"{{name: deep, steps: {deep}}}"] * bool(deep)
    found = read("rlcr_1.5b", "sampler.max_rows=256", f"phases=[{', '.join(phases)}]")
    assert found.spec.sampler.engine == engine


def test_the_page_names_the_profiles_that_take_vllm(machine):
    """Each on the GPU that it is for."""
    page = (EXPERIMENTS.parent / "docs" / "gpu.md").read_text()
    (line,) = re.findall(
        r"they sample with it; on the GPUs above, these are (.*?)\. vLLM", page, re.S
    )
    taking = set()
    for path in [*EXPERIMENTS.glob("*b.yaml"), *EXPERIMENTS.glob("study/gpu/*.yaml")]:
        gpu = "GeForce RTX 4090" if "24 GB" in path.read_text() else "H100 80GB HBM3"
        machine(listing=H100.replace("H100 80GB HBM3", gpu))
        spec = read_spec(path)
        compared = "3b" in path.stem or path.parent.name == "gpu"
        assert ("auto" in spec.origins["sampler.engine"]) == (not compared)
        if spec.spec.sampler.engine == "vllm":
            taking.add(str(path.relative_to(EXPERIMENTS).with_suffix("")))
    assert taking == set(re.findall(r"`(.*?)`", line))


def test_levels_follow_from_the_settings_alone():
    kg = list_expected_levels(read_spec(EXPERIMENTS / "kg_1.5b.yaml").spec.rollout)
    assert [(one.turns, one.openings, one.opening, one.at_most) for one in kg] == [
        (512, 32, 512, 256),
        *[(512, 512, 64, 256)] * 6,
    ]
    rule = ["rollout.max_prompt_tokens.limit=900"]
    two = list_expected_levels(read_spec(EXPERIMENTS / "rlcr_1.5b.yaml", rule).spec.rollout)
    assert [(one.turns, one.openings, one.opening, one.at_most) for one in two] == [
        (512, 64, 900, 1024),
        (2048, 512, 64, 256),
    ]


def test_what_is_not_read_cannot_run():
    tree = read_spec(EXPERIMENTS / "quick.yaml").spec.dump_resolved()
    spec = ExperimentSpec.model_validate_json(
        json.dumps({**tree, "sampler": {"engine": "auto", "max_rows": 4}}), strict=True
    )
    refusal = "auto is replaced by an engine when"
    with pytest.raises(EnvironmentFault, match=refusal):
        require_engine(spec.sampler)
    policy = build_policy(TinyModelSpec(hidden_size=32, heads=1, kv_heads=1, layers=1), 0)
    with pytest.raises(EnvironmentFault, match=refusal):
        open_sampler(policy, spec.sampler, spec.runner, torch.device("cpu"))


def test_it_is_a_plugin_like_others(capsys):
    assert main(["plugins", "check", "auto"]) == 0
    assert "promises hold" in capsys.readouterr().out


def test_names_near_it_are_offered_and_options_of_engines_refused():
    with pytest.raises(InvalidSpec, match=r"(?s)'vllm' or 'auto', not text 'aut'.*mean 'auto'"):
        check_file(EXPERIMENTS / "quick.yaml", ["sampler.engine=aut"])
    with pytest.raises(InvalidSpec, match="'kv_cache_mb' belongs to 'vllm'"):
        check_file(EXPERIMENTS / "quick.yaml", ["sampler={engine: auto, kv_cache_mb: 9}"])


def test_plan_and_show_say_it(capsys):
    quick = str(EXPERIMENTS / "quick.yaml")
    assert main(["plan", quick, "--set=sampler.engine=auto"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "sampler transformers, because the run is on the CPU" in out
    assert main(["plan", quick, "--json", "--set=sampler.engine=auto"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["choices"] == {"sampler": "transformers, because the run is on the CPU"}
    assert main(["validate", "--values", quick, "--format=json", "--set=sampler.engine=auto"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["values"]["sampler.engine"] == "transformers"
    assert shown["origins"]["sampler.engine"] == "--set (auto)"
    assert shown["digest"] == told["digest"]
