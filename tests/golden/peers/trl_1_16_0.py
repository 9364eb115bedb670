"""TRL 1.16.0's advantages and losses on random rows: `python trl_1_16_0.py SOURCES FILE [SEED]`."""

import inspect
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

sys.path.insert(0, sys.argv[1])

import torch
from records import Records, run_branch, take_gradient
from trl.experimental.gkd.gkd_trainer import GKDTrainer
from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer
from trl.experimental.iw_opd.iw_opd_trainer import IWOPDTrainer
from trl.experimental.sdpo.loss_utils import compute_sampled_token_self_distillation_loss
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import nanstd

ROWS, WIDTH, LIMIT = 6, 5, 9
"""Rows, tokens, and what `dr_grpo` divides by."""


def main() -> None:
    """Writes the records."""
    torch.set_default_dtype(torch.float64)
    records = Records("TRL 1.16.0", rtol=1e-6, atol=1e-7)
    for _ in range(4):
        add_advantages(records)
        add_losses(records)
        add_kl(records)
    add_empty_rows(records)
    for _ in range(2):
        add_teacher(records)
    records.write()


def add_advantages(records: Records) -> None:
    """σ of the group, of the batch, and none; several rewards, some of them absent."""
    source, size, prompts = inspect.getsource(GRPOTrainer), 4, 3
    weights = torch.tensor([1.0, 0.5])
    rewards = torch.stack([records.draw_scores(prompts * size) for _ in weights], dim=1)
    rewards[torch.tensor([records.random.random() < 0.2 for _ in rewards]), 1] = torch.nan
    groups = [g for g in range(prompts) for _ in range(size)]
    for how, scale in (
        ("sum_then_normalize", "group"),
        ("sum_then_normalize", "batch"),
        ("sum_then_normalize", "none"),
        ("normalize_then_sum", "group"),
    ):
        trainer = SimpleNamespace(
            multi_objective_aggregation=how,
            scale_rewards=scale,
            reward_weights=weights,
            reward_funcs=[None] * len(weights),
        )
        names = {
            "self": trainer,
            "rewards_per_func": rewards,
            "num_generations": size,
            "device": "cpu",
            "unscorable_mask": torch.isnan(rewards).all(dim=1),
            "torch": torch,
            "nanstd": nanstd,
        }
        advantages = run_branch(source, "multi_objective_aggregation", names)["advantages"]
        outputs = {"advantages": advantages[:, None]}
        if how == "normalize_then_sum":
            named = [[None if v != v else v for v in row] for row in rewards.tolist()]
            given = {"named_rewards": named, "reward_weights": weights}
            records.add("estimators.gdpo", {**given, "group_ids": groups}, outputs, {"eps": 1e-4})
        else:
            totals = (rewards * weights).nansum(dim=1)
            ours = {"group": "std", "batch": "batch_std", "none": "center"}[scale]
            given = {"global_rewards": totals, "group_ids": groups}
            options = {"normalize": ours, "eps": 1e-4}
            records.add("estimators.grpo", given, outputs, options)


class Trainer:
    """What the loss reads of a trainer."""

    use_vllm = vllm_importance_sampling_correction = False
    aux_loss_enabled = use_adaptive_entropy = _entropy_bonus_enabled = False
    top_entropy_quantile = 1.0
    current_gradient_accumulation_steps = 1
    max_completion_length = LIMIT

    def __init__(self, logprobs: torch.Tensor, **settings: object) -> None:
        self.logprobs = logprobs
        self.beta, self.epsilon_low, self.epsilon_high = 0.0, 0.2, 0.28
        self.loss_type, self.importance_sampling_level = "grpo", "token"
        self.off_policy_mask_threshold = None
        self.args = SimpleNamespace(
            delta=None,
            use_bias_correction_kl=True,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            steps_per_generation=1,
        )
        for name, value in settings.items():
            setattr(self.args if hasattr(self.args, name) else self, name, value)
        self.model = SimpleNamespace(training=True)
        self._metrics = {"train": defaultdict(list)}
        self.accelerator = SimpleNamespace(
            gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1
        )

    def _get_per_token_logps_and_entropies(self, *_: object, **__: object) -> tuple:
        return self.logprobs, torch.zeros_like(self.logprobs), None

    get_off_policy_mask = staticmethod(GRPOTrainer.get_off_policy_mask)


def compute_loss(
    cls: type, logprobs: torch.Tensor, drawn: dict, reference: torch.Tensor, **settings: object
) -> torch.Tensor:
    """The loss of one batch whose advantages are one per row."""
    mask, whole = drawn["mask"], torch.ones(len(drawn["mask"]), 1)
    inputs = {
        "prompt_ids": whole.long(),
        "prompt_mask": whole,
        "completion_ids": torch.zeros_like(mask).long(),
        "completion_mask": mask,
        "advantages": drawn["advantages"][:, 0],  # a row with any token has the first
        "old_per_token_logps": drawn["old_logprobs"],
        "ref_per_token_logps": reference,
        "num_items_in_batch": mask.sum(),
    }
    return cls._compute_loss(Trainer(logprobs, **settings), None, inputs)


def add_losses(records: Records) -> None:
    """Every loss type that rlx can say, at both levels of importance sampling."""
    plain = {"clip": [0.2, 0.28], "dual_clip": None}
    sapo = {"surrogate": "sapo", "temperatures": [1.0, 1.05], "aggregate": "sequence_mean"}
    for cls, settings, options in (
        (GRPOTrainer, {"loss_type": "grpo"}, {**plain, "aggregate": "sequence_mean"}),
        (GRPOTrainer, {"loss_type": "bnpo"}, {**plain, "aggregate": "token_mean"}),
        (GRPOTrainer, {"loss_type": "dr_grpo"}, {**plain, "aggregate": "constant"}),
        (GRPOTrainer, {"loss_type": "dapo"}, {**plain, "aggregate": "token_mean"}),
        (GRPOTrainer, {"loss_type": "sapo"}, sapo),
        (
            GRPOTrainer,
            {"loss_type": "grpo", "importance_sampling_level": "sequence"},
            {**plain, "ratio": "sequence", "aggregate": "sequence_mean"},
        ),
        (
            GRPOTrainer,
            {"loss_type": "grpo", "off_policy_mask_threshold": 0.1},
            {**plain, "sequence_mask": 0.1, "aggregate": "sequence_mean"},
        ),
        (
            GRPOTrainer,
            {"loss_type": "cispo", "epsilon_high": 1.28},
            {"surrogate": "cispo", "clip": [1.0, 0.28], "aggregate": "token_mean"},
        ),
        (
            GMPOTrainer,
            {"epsilon_low": 0.3, "epsilon_high": 0.4},
            {
                "surrogate": "log_clip",
                "ratio": "sequence",
                "clip": [0.3, 0.4],
                "aggregate": "sequence_mean",
            },
        ),
    ):
        drawn = records.draw_policy(ROWS, WIDTH, per_row=True)
        compute = partial(compute_loss, cls, drawn=drawn, reference=drawn["logprobs"], **settings)
        outputs = take_gradient(compute, drawn)
        given = {**drawn, "lengths": [LIMIT] * ROWS}
        records.add("losses.policy", given, outputs, options)


def add_kl(records: Records) -> None:
    """The KL penalty: k3 without clamps, by default times the ratio."""
    why = "TRL multiplies k3 by the ratio, whose gradient on-policy is that of k2 in rlx"
    for corrects, differs in ((False, ""), (True, why)):
        for _ in range(3):
            drawn = records.draw_policy(1, 1)
            drawn["advantages"] = drawn["advantages"] * 0
            reference = drawn["logprobs"] - records.random_tensor(1, 1)
            value = compute_loss(
                GRPOTrainer,
                drawn["logprobs"],
                drawn,
                reference,
                beta=1.0,
                use_bias_correction_kl=corrects,
            )
            given = {"logprobs": drawn["logprobs"][0], "reference": reference[0]}
            outputs, options = {"value": [value.item()]}, {"kind": "k3"}
            records.add("kl.kl_terms", given, outputs, options, differs=differs)


def add_empty_rows(records: Records) -> None:
    """Rows without a learning token, such as answers that are cut off: the losses count them."""
    for loss_type, options in (
        ("grpo", {"aggregate": "sequence_mean"}),
        ("dr_grpo", {"aggregate": "constant"}),
        ("dapo", {"aggregate": "token_mean"}),
    ):
        drawn = records.draw_policy(ROWS, WIDTH, per_row=True)
        for empty in records.random.sample(range(ROWS), 2):
            drawn["mask"][empty] = drawn["advantages"][empty] = 0.0
        compute = partial(
            compute_loss,
            GRPOTrainer,
            drawn=drawn,
            reference=drawn["logprobs"],
            loss_type=loss_type,
        )
        outputs = take_gradient(compute, drawn)
        given = {**drawn, "lengths": [LIMIT] * ROWS, "counted": [True] * ROWS}
        plain = {"clip": [0.2, 0.28], "dual_clip": None}
        records.add("losses.policy", given, outputs, {**plain, **options})


def add_teacher(records: Records) -> None:
    """On-policy distillation: over the whole vocabulary, and of the tokens that were sampled."""
    tokens, words = 4, 6
    teacher = records.random_tensor(tokens, words)
    ids = torch.tensor([records.random.randrange(words) for _ in range(tokens)])
    drawn = {"logits": records.random_tensor(tokens, words), "teacher_logits": teacher}
    sampled = {**drawn, "tokens": ids}

    def take(loss: Callable[[torch.Tensor], torch.Tensor]) -> tuple[float, list]:
        logits = drawn["logits"].clone().requires_grad_()
        value = loss(logits)
        return value.item(), torch.autograd.grad(value, logits)[0].tolist()

    def add(given: dict, kind: str, differs: str = "", **outputs: object) -> None:
        options = {"coefficient": 1.0, "kl_penalty": kind}
        records.add("losses.teacher", given, outputs, options, differs=differs)

    labels = torch.zeros(1, tokens)
    value, gradient = take(
        lambda logits: GKDTrainer.generalized_jsd_loss(logits[None], teacher[None], labels, beta=1)
    )
    add(drawn, "k2", gradient=gradient)
    add(drawn, "k1", value=value)
    add(drawn, "k3", value=value)
    why = "TRL sums the KL over the vocabulary; half the squared log-ratio has its gradient alone"
    add(drawn, "k2", why, value=value)
    _, forward = take(
        lambda logits: GKDTrainer.generalized_jsd_loss(logits[None], teacher[None], labels, beta=0)
    )
    add(drawn, "k3", gradient=forward)
    value, gradient = take(
        lambda logits: compute_sampled_token_self_distillation_loss(
            logits, teacher, ids, distillation_alpha=1.0
        ).mean()
    )
    add(sampled, "k2", gradient=gradient)
    add(sampled, "k2", "TRL's value is the log-ratio times log π", value=value)
    trainer = SimpleNamespace(
        temperature=1.0,
        iw_opd_epsilon=1e-8,
        iw_opd_gamma=0.0,
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
    )
    at = teacher.log_softmax(-1).gather(1, ids[:, None]).T

    def weigh(logits: torch.Tensor) -> torch.Tensor:
        given = logits[None], ids[None], labels, at
        return IWOPDTrainer._compute_iw_opd_loss(trainer, *given)

    add(sampled, "k2", gradient=take(weigh)[1])
    trainer.iw_opd_gamma = 1.0
    add(sampled, "k2", "TRL weighs early tokens up to twice", gradient=take(weigh)[1])


if __name__ == "__main__":
    main()
