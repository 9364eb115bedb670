"""Learner, critic, reference and sampler on a mirrored GPU, and mutants that it finds.

Whole runs are in `test_mirrored_profiles.py`, weights on their way to vLLM in
`test_mirrored_transfer.py`.

`tests/mirrored_gpu.py` says what a mirrored GPU shows and what not.
"""

import dataclasses
import gc
import sys
import weakref
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from babblers import use_flash
from mirrored_gpu import CUDA, mirror_gpu, mutate

from rlx.checks import read_spec
from rlx.learner import (
    Critic,
    Learner,
    Ranks,
    build_learner_with_reference,
    choice,
    flash,
    forward,
    vocabulary,
)
from rlx.learner.chains import AttentionChains
from rlx.learner.forms import CachedForm, ChainForm, GroupedForm, PlainForm
from rlx.learner.pack import PackedBatch
from rlx.learner.share import RankMicroBatches
from rlx.loss import surrogates
from rlx.model import build_policy, warm_start_policy
from rlx.plugin import Problem
from rlx.recipe import build_recipe
from rlx.rollout import build_rollout_plan, sample_rollout_trees
from rlx.sampler import (
    TransformersSampler,
    copy_policy,
    flash_steps,
    shared_attention,
    shared_rows,
)
from rlx.sampler.captured import CapturedSteps
from rlx.sampler.rows import COMPACT_BELOW
from rlx.sampler.shared_attention import StepAttention
from rlx.sampler.transformers_engine import _DecodingLoop, _TransformersSession
from rlx.spec import (
    CriticSpec,
    LossSpec,
    OptimizerSpec,
    RunnerSpec,
    TinyModelSpec,
    TurnSpec,
    TwoTurnRolloutSpec,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from shapes import Shape, train_batch

CPU = torch.device("cpu")
EXPERIMENTS = Path(__file__).parents[2] / "experiments"
MODEL = TinyModelSpec(
    hidden_size=64, heads=4, kv_heads=2, head_dim=32, layers=2, intermediate_size=96
)
SHAPE = Shape(2, 30, 16, 6, 4, answers=3, confidences=2)
SCHEDULE = TwoTurnRolloutSpec(
    num_generations_answer=3,
    num_generations_confidence=2,
    answer=TurnSpec(max_new_tokens=80),
    confidence=TurnSpec(template="sure?\n", max_new_tokens=10),
)
PROBLEMS = [Problem(id=str(n), prompt=f"nums: {n} 7\ntarget: {n}\n", fields={}) for n in range(3)]


class PlainEngine:
    """What DeepSpeed does on one rank: gradients summed over micro-batches, then one step."""

    def __init__(self, module, spec, runner, ranks, *, section, make_optimizer=None):
        self._module = module.to(ranks.device)
        for parameter in module.parameters():
            parameter.data = parameter.data.to(getattr(torch, runner.dtype))
        self._learned = [p for p in module.parameters() if p.requires_grad]
        self._optimizer = torch.optim.SGD(self._learned, lr=spec.learning_rate, foreach=False)
        module.eval()

    def __call__(self, *arguments, **options):
        return self._module(*arguments, **options)

    def begin_phase(self, spec, *, fresh): ...

    def step(self, share, term, rate):
        for packed in share:
            term(packed).backward()
        norms = [p.grad.float().norm() for p in self._learned if p.grad is not None]
        norm = float(torch.stack(norms).norm())
        self._optimizer.step()
        self._optimizer.zero_grad()
        return norm

    def gather_parameter(self, parameter):
        return parameter.detach()


@pytest.fixture(autouse=True)
def plain_engine(monkeypatch):
    from rlx.learner import critic, learner

    monkeypatch.setattr(learner, "TrainingEngine", PlainEngine)
    monkeypatch.setattr(critic, "TrainingEngine", PlainEngine)
    # Flex attention compiles kernels: there is no compiler for a mirrored GPU.
    forms = (GroupedForm(), CachedForm(), PlainForm())
    monkeypatch.setitem(choice.FORMS, "cuda", forms)


@pytest.fixture
def gpu():
    with mirror_gpu() as gpu:
        yield gpu


# The learner -------------------------------------------------------------------------------------


def update(device, dtype="float32", form=None, loss=None, **options):
    """One update of a new model: its statistics, and the log-probabilities after it."""
    forms = (form, PlainForm()) if form else choice.FORMS["cuda"]
    with patch.dict(choice.FORMS, {device.type: forms}):
        policy = build_policy(MODEL, 0)
        runner = RunnerSpec(device=device.type, dtype=dtype, micro_batch_tokens=120, **options)
        learner = Learner(policy, runner, OptimizerSpec(), Ranks(0, 1, device))
    assert learner.chosen.form is forms[0], learner.chosen
    train = train_batch(SHAPE, len(policy.tokenizer))
    stats = learner.update(train, loss or LossSpec(), 1e-2)
    return stats, learner.logprobs(train.batch, train.mask)


@pytest.fixture
def flash_of_the_cpu(monkeypatch):
    """The mirrored GPU has no flash attention but the CPU's."""
    monkeypatch.setattr(flash, "_select_kernel", lambda _: "cpu")


FORMS = (ChainForm(), GroupedForm(), CachedForm(), PlainForm())


@pytest.mark.usefixtures("flash_of_the_cpu")
@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.name)
def test_an_update_is_that_of_the_cpu(gpu, form):
    if isinstance(form, PlainForm):
        form, choice.FORMS["cuda"] = None, (form,)
    there, logprobs = update(CUDA, form=form)
    assert type(logprobs) is torch.Tensor, "what leaves the learner is on the host"
    here, expected = update(CPU, form=form)
    for name, value in dataclasses.asdict(here).items():
        assert getattr(there, name) == (value and pytest.approx(value, rel=1e-4)), name
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)


CHAIN_PARTS = ("places", "tokens", "real[:, None, :, None]")


@pytest.mark.usefixtures("flash_of_the_cpu")
@pytest.mark.parametrize("part", CHAIN_PARTS)
def test_a_layout_of_chains_left_on_the_host_is_found(gpu, monkeypatch, part):
    mutant = mutate(AttentionChains, "from_positions", f"{part}.to(device)", part)
    monkeypatch.setattr(AttentionChains, "from_positions", classmethod(mutant))
    with pytest.raises(AssertionError, match=r"chain attention \(.*found at least two devices"):
        update(CUDA, form=ChainForm())


def test_a_batch_is_packed_once_for_all_updates_of_one_loss(monkeypatch):
    packs = []

    def pack(*args, **options):
        packs.append(args)
        return RankMicroBatches(*args, **options)

    monkeypatch.setattr("rlx.learner.learner.RankMicroBatches", pack)
    monkeypatch.setattr("rlx.learner.critic.RankMicroBatches", pack)

    def learn(updates, *, anew):
        policy = build_policy(MODEL, 0)
        learner = Learner(policy, RunnerSpec(), OptimizerSpec(), Ranks(0, 1, CPU))
        train, found = train_batch(SHAPE, len(policy.tokenizer)), []
        for loss in updates:
            found.append(learner.update(train, loss or LossSpec(), 1e-2))
            train = dataclasses.replace(train) if anew else train
        return found

    first, other = LossSpec(), LossSpec(entropy={"coefficient": 0.1})
    once = learn([first, first, other], anew=False)
    assert len(packs) == 2, "the second loss may need other tokens"
    packs.clear()
    assert learn([first, first, other], anew=True) == once
    assert len(packs) == 3
    packs.clear()
    policy = build_policy(MODEL, 0)
    critic = Critic(policy, RunnerSpec(), CriticSpec(value_clip=None), Ranks(0, 1, CPU), 0)
    train = train_batch(SHAPE, len(policy.tokenizer))
    train = dataclasses.replace(train, returns=train.mask.float())
    assert critic.update(train, 1e-2).loss > critic.update(train, 1e-2).loss
    assert len(packs) == 1


def test_a_trial_leaves_nothing_behind(monkeypatch):
    """Not even until the garbage collector comes: DeepSpeed needs the memory next."""
    tried = []

    def copy_model(*args):
        copied = choice_copy(*args)
        tried.extend(map(weakref.ref, copied.parameters()))
        return copied

    choice_copy = choice.copy_model
    monkeypatch.setattr(choice, "copy_model", copy_model)
    policy = build_policy(MODEL, 0)
    runner = RunnerSpec(activation_checkpointing=True)
    gc.collect()
    gc.disable()
    try:
        learner = Learner(policy, runner, OptimizerSpec(), Ranks(0, 1, CPU))
        critic = Critic(policy, runner, CriticSpec(), Ranks(0, 1, CPU), 0)
        left = [one for one in tried if one() is not None]
    finally:
        gc.enable()
    assert len(tried) > 10 and not left
    assert learner.chosen and critic


def test_critic_and_reference(gpu):
    policy = build_policy(MODEL, 0)
    runner = RunnerSpec(device="cuda", dtype="bfloat16", activation_checkpointing=True)
    ranks = Ranks(0, 1, CUDA)
    critic = Critic(policy, runner, CriticSpec(), ranks, 0)
    train = train_batch(SHAPE, len(policy.tokenizer))
    learner, reference = build_learner_with_reference(policy, runner, OptimizerSpec(), ranks)
    streams = dataclasses.replace(
        train.streams,
        optional={
            "values": critic.values(train.batch, train.mask),
            "reference_logprobs": reference.logprobs(train.batch, train.mask),
        },
    )
    train = dataclasses.replace(train, streams=streams, returns=torch.randn(train.mask.shape))
    assert critic.update(train, 1e-4).loss > 0
    stats = learner.update(train, LossSpec(kl={"coefficient": 0.01}), 1e-3)
    assert stats.kl_loss == pytest.approx(0, abs=1e-3)


def test_a_warm_start_is_that_of_the_cpu(gpu, monkeypatch, tmp_path):
    sizes = ("model.hidden_size=32", "model.heads=1", "model.kv_heads=1", "model.layers=1")
    sizes += ("model.intermediate_size=32", "model.warm_start.steps=3")
    spec = read_spec(EXPERIMENTS / "quick.yaml", [*sizes]).spec

    def train(device):
        policy, losses = build_policy(spec.model, 0), []
        task = build_recipe(spec).demonstrations
        warm_start_policy(
            *(policy, spec, task, tmp_path, lambda step, steps, loss: losses.append(loss)),
            device=device,
        )
        assert {p.device.type for p in policy.model.parameters()} == {"cpu"}
        return losses

    there, here = train(CUDA), train(CPU)
    assert len(there) == len(here) == 3, "results of another kind of device are not reused"
    assert there[0] == pytest.approx(here[0], rel=1e-5)
    assert there == pytest.approx(here, rel=1e-4)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 10, 1 << 10))
    assert train(CUDA) == [], "too little memory: trained on the CPU, as before"


# The sampler -------------------------------------------------------------------------------------


MANY = {"answers": 16, "max_rows": 48, "end_ids": tuple(range(0, 140, 30))}
"""For `draw`: so many rows that end one by one that a batch becomes smaller several times."""


def draw(device, dtype=torch.float32, answers=3, max_rows=16, **options):
    """Tokens and log-probabilities of both turns, and how they were computed."""
    schedule = SCHEDULE.model_copy(update={"num_generations_answer": answers})
    policy = dataclasses.replace(build_policy(MODEL, 0), **options)
    sampler = TransformersSampler(copy_policy(policy, dtype), max_rows=max_rows, device=device)
    with sampler.session() as session:
        plan = build_rollout_plan(schedule)
        trees = sample_rollout_trees(plan, PROBLEMS, range(len(PROBLEMS)), session, policy.dialogue)
    turns = [s for tree in trees for s in tree.segments if s.logprobs]
    return sampler.description, [s.token_ids for s in turns], [p for s in turns for p in s.logprobs]


@pytest.mark.parametrize("flash", [False, True], ids=["products", "flash attention"])
def test_captured_steps_draw_what_the_cpu_draws(gpu, flash):
    with use_flash(wanted=flash):
        description, tokens, logprobs = draw(CUDA, **MANY)
    assert description.endswith("captured steps" + " with flash attention" * flash)
    assert gpu.graphs and gpu.replays > 20
    _, expected, likely = draw(CPU, **MANY)
    assert tokens == expected
    assert logprobs == pytest.approx(likely, abs=1e-4)


def test_rows_that_end_one_by_one_cost_fewer_captures(gpu, monkeypatch):
    """Every smaller batch is captured, so half of its rows end before it is made smaller."""
    _, tokens, logprobs = draw(CUDA, **MANY)
    captures = len(gpu.graphs)
    monkeypatch.setattr(shared_rows, "COMPACT_CAPTURED_BELOW", COMPACT_BELOW)
    _, same, likely = draw(CUDA, **MANY)
    assert tokens == same
    assert logprobs == pytest.approx(likely, abs=1e-5)
    assert 0 < captures < len(gpu.graphs) - captures - 1


def test_flash_attention_that_differs_is_named_and_not_used(gpu, monkeypatch):
    with use_flash():
        attend = flash_steps.attend_sequences
        monkeypatch.setattr(
            flash_steps, "attend_sequences", lambda q, *rest: (0 * q, attend(q, *rest)[1])
        )
        description, tokens, _ = draw(CUDA)
    assert "captured steps, no flash attention: logits that differ" in description
    assert tokens == draw(CPU)[1]


@pytest.mark.parametrize("flash", [False, True], ids=["products", "flash attention"])
def test_a_step_waits_only_to_look_for_finished_rows(gpu, flash):
    """Waits by line: one look in four steps, and what is left when rows finish."""
    with use_flash(wanted=flash):
        draw(CUDA, end_ids=())  # 80 + 10 steps, and those of the trial
    rooms = ("sampler/captured", "sampler/shared_", "sampler/flash_", "plain_decoder")
    in_steps = {
        line: count for line, count in gpu.waits.items() if any(room in line for room in rooms)
    }
    assert not in_steps
    looks = [n for line, n in gpu.waits.items() if line.startswith("rlx/sampler/transformers_eng")]
    assert sum(looks) < (80 + 10) / 4 + 20, gpu.waits


def waits_beside(gpu):
    """Another thread waits for the device during every capture, as a learner does."""
    failures = []
    busy = torch.ones(2, device="cuda")

    def work():
        try:
            busy.sum().item()
        except RuntimeError as error:
            failures.append(error)

    gpu.beside_captures = work
    return failures


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        torch.AcceleratorError("CUDA error: out of memory"),  # of cudaGraphInstantiate
    ],
    ids=["allocator", "graph"],
)
def test_memory_is_made_free_before_a_capture(gpu, monkeypatch, error):
    """A capture cannot do it, and a run of a real model captures some fifty graphs in a step."""
    emptied, fails = [], []

    def record(self):
        if fails:
            raise fails.pop()
        return recorded(self)

    recorded = CapturedSteps._record
    monkeypatch.setattr(CapturedSteps, "_record", record)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(len(gpu.graphs)))
    monkeypatch.setattr("rlx.sampler.transformers_engine.give_memory_back", lambda _: None)
    description, *_ = draw(CUDA)
    assert description.endswith("captured steps")
    assert emptied == list(range(len(gpu.graphs))), "once before each"
    count = len(gpu.graphs)
    fails.append(error)
    assert draw(CUDA)[0].endswith("captured steps")
    assert emptied[count : count + 2] == [count, count], "once more, and then it is there"


def test_another_thread_trains_during_captures(gpu):
    failures = waits_beside(gpu)
    description, *_ = draw(CUDA)
    assert description.endswith("captured steps") and not failures


# Mutants -----------------------------------------------------------------------------------------

MOVES = [
    (RankMicroBatches, "__iter__", ".to(self._ranks.device)", "", update),
    (
        PackedBatch,
        "gather_targets",
        "copy_to(tensor[self.rows, self.columns], self.targets.device)",
        "tensor[self.rows, self.columns]",
        update,
    ),
    (_TransformersSession, "_sample_batch", ".to(logits.device)", "", draw),
    (_DecodingLoop, "_drop", "self._counts)\n", "self._counts.cpu())\n", partial(draw, **MANY)),
]
CAPTURES = [
    (
        StepAttention,
        "advance",
        "self._bias.scatter_(1, (self._seen.shared + self._columns)[:, None], 0.0)",
        "self._bias[self._rows, self._seen.shared + self._columns] = 0",
    ),
    (CapturedSteps, "_step", "attention.longest", "int(attention.positions.max()) + 1"),
    (CapturedSteps, "_record", 'capture_error_mode="thread_local"', ""),
    (
        CapturedSteps,
        "_record",
        "torch.cuda.stream(_get_capture_stream())",
        "torch.cuda.stream(None)",
    ),
    (CapturedSteps, "step", "self._graph.replay()", "pass"),
]


def predict_branches(device):
    """Gradients of states that several tokens follow, by chunks of the vocabulary."""
    hidden, weight = (torch.randn(n, 8).to(device).requires_grad_() for n in (3, 50))
    states, tokens = (torch.tensor(x).to(device) for x in ([0, 0, 2, 0], [1, 40, 3, 7]))
    logprobs, _ = vocabulary.compute_token_logprobs(
        hidden, weight, None, torch.ones(3).to(device), states, tokens, chunk=16
    )
    logprobs.sum().backward()


def update_rows(device, form=None):
    """An update with logits by chunks, and a ratio of each row."""
    with patch.object(choice, "WHOLE_LOGITS", 0):
        update(device, form=form, loss=LossSpec(ratio="sequence"))


def sum_in_any_order(values, slots, count):
    return values.new_zeros(count).index_add(0, slots, values)


UNORDERED = [
    (forward, "take_rows", lambda states, at: states.index_select(0, at), update_rows),
    (surrogates, "sum_by_slot", sum_in_any_order, update_rows),
    (vocabulary, "sum_by_slot", sum_in_any_order, predict_branches),
]


@pytest.mark.parametrize("form", [GroupedForm(), CachedForm(), PlainForm()], ids=lambda f: f.name)
def test_an_update_sums_in_the_same_order_every_time(gpu, form):
    update_rows(CUDA, form)
    predict_branches(CUDA)
    assert not gpu.unordered


@pytest.mark.parametrize("mutant", UNORDERED, ids=lambda m: f"{m[0].__name__}: {m[1]}")
def test_sums_in_the_order_of_threads_are_found(gpu, monkeypatch, mutant):
    owner, name, unordered, work = mutant
    monkeypatch.setattr(owner, name, unordered)
    work(CUDA)
    assert gpu.unordered


@pytest.mark.parametrize("mutant", MOVES, ids=lambda m: m[1])
def test_a_device_move_left_out_is_found(gpu, monkeypatch, mutant):
    owner, name, old, new, work = mutant
    monkeypatch.setattr(owner, name, mutate(owner, name, old, new))
    with pytest.raises((RuntimeError, IndexError, TypeError), match=r"cuda|cpu|device"):
        work(CUDA)


def test_a_mask_on_the_host_is_found(gpu, monkeypatch):
    name = "_build_ancestor_masks"
    mutant = mutate(shared_attention, name, "for place in at], device=device)", "for place in at])")
    monkeypatch.setattr(shared_attention, name, mutant)
    assert draw(CUDA)[0].startswith("the model's own forward pass: it has parts that")


@pytest.mark.parametrize("mutant", CAPTURES, ids=lambda m: f"{m[1]}: {m[3]}")
def test_a_step_that_cannot_be_captured_says_so(gpu, monkeypatch, mutant):
    owner, name, old, new = mutant
    monkeypatch.setattr(owner, name, mutate(owner, name, old, new))
    waits_beside(gpu)
    assert "steps not captured: " in draw(CUDA)[0]
    assert not gpu.capturing and not any(gpu.streams.values()), "nothing stays behind"
