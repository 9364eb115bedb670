"""Writes records of worked examples; imported by the scripts that run in a peer's environment.

They take the folder of the peer's sources, the file to write, and a seed (0 by default).
"""

import ast
import json
import math
import random
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

try:
    import torch
except ImportError:  # not every peer computes with tensors
    torch = None


def hide(values: Any, mask: Any) -> list[list[float | None]]:
    """Values inside the mask, None outside."""
    return [
        [v if m else None for v, m in zip(row, inside, strict=True)]
        for row, inside in zip(values.tolist(), mask.tolist(), strict=True)
    ]


def take_gradient(loss: Callable[[Any], Any], drawn: Mapping[str, Any]) -> dict[str, Any]:
    """A loss of log-probabilities and its gradient, as outputs of a record."""
    logprobs = drawn["logprobs"].clone().requires_grad_()
    value = loss(logprobs)
    value.backward()
    gradient = torch.zeros_like(logprobs) if logprobs.grad is None else logprobs.grad
    return {"value": value.item(), "gradient": hide(gradient, drawn["mask"])}


def run_branch(source: str, word: str, names: dict[str, Any]) -> dict[str, Any]:
    """Runs the `if` of a peer's source that has a word in it and sets `advantages`, and returns its
    variables: some peers compute advantages amid a method that also samples and scores."""
    found = [
        node
        for node in ast.walk(ast.parse(textwrap.dedent(source)))
        if isinstance(node, ast.If) and word in ast.unparse(node) and _sets(node, "advantages")
    ]
    branch = max(found, key=lambda node: len(ast.unparse(node)))
    exec(compile(ast.Module([branch], []), "<peer>", "exec"), names)
    return names


def run_function(source: str, name: str, names: dict[str, Any]) -> Callable[..., Any]:
    """A function of a peer's module, without what the rest of the module imports; `names` are what
    it reads of the module."""
    tree = ast.parse(source)
    (found,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
    found.decorator_list, found.returns = [], None
    exec(compile(ast.Module([found], []), "<peer>", "exec"), names)
    return names[name]


def _sets(branch: ast.If, name: str) -> bool:
    """Whether a statement of the branch itself, not of one inside, sets a variable."""
    targets = [t for node in branch.body if isinstance(node, ast.Assign) for t in node.targets]
    return any(isinstance(t, ast.Name) and t.id == name for t in targets)


def list_values(named: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors and arrays as lists."""
    return {n: v.tolist() if hasattr(v, "tolist") else v for n, v in named.items()}


class Records:
    """Collects records and writes them as JSON, with tolerances for peers that compute in
    float32."""

    def __init__(self, source: str, **tolerances: float) -> None:
        self.random = random.Random(int(sys.argv[3]) if len(sys.argv) > 3 else 0)
        self._head = {"source": source, **tolerances}
        self._examples: list[dict[str, Any]] = []
        self._differences: list[dict[str, Any]] = []
        self._lists: dict[str, list[Any]] = {}

    def add(
        self,
        function: str,
        inputs: dict[str, Any],
        outputs: dict[str, Any],
        options: dict[str, Any] | None = None,
        *,
        differs: str = "",
    ) -> None:
        """Adds a record. `differs` says why rlx gives something else on purpose."""
        into = self._differences if differs else self._examples
        record = {"id": f"{'difference ' if differs else ''}{len(into) + 1}", "function": function}
        record |= {"title": differs, "inputs": list_values(inputs), "options": options or {}}
        into.append({**record, "outputs": list_values(outputs)})

    def add_kl(self, estimate: Callable[..., Any], logprobs: Any, reference: Any) -> None:
        """Adds KL estimates of every kind."""
        given = {"logprobs": logprobs, "reference": reference}
        for kind in ("k1", "abs", "k2", "k3"):
            terms = estimate(logprobs, reference, kind)
            self.add("kl.kl_terms", given, {"value": terms}, {"kind": kind})

    def add_value_losses(
        self, compute: Callable[..., Any], old: Any, new: Any, returns: Any, differs: str = ""
    ) -> None:
        """Adds the losses of single values."""
        one = torch.ones(1, 1)
        each = [
            compute(n.view(1, 1), r.view(1, 1), o.view(1, 1), one, 0.2)[0].item()
            for n, r, o in zip(new, returns, old, strict=True)
        ]
        given = {"values": new, "old_values": old, "returns": returns}
        self.add("loss.value_loss", given, {"value": each}, {"clip": 0.2}, differs=differs)

    def note(self, name: str, entry: Any) -> None:
        """Adds an entry to another list of the file."""
        self._lists.setdefault(name, []).append(entry)

    def random_tensor(self, *shape: int) -> Any:
        """Numbers between -1 and 1."""
        count = math.prod(shape)
        return torch.tensor([self.random.uniform(-1, 1) for _ in range(count)]).view(shape)

    def draw_scores(self, rows: int) -> Any:
        """`[rows]` scores, many of them equal."""
        draw = self.random
        return torch.tensor([draw.choice([0.0, 1.0, 0.5, draw.random()]) for _ in range(rows)])

    def draw_mask(self, rows: int, width: int, *, gaps: bool = False) -> Any:
        """`[rows, width]` responses of different lengths, if asked for with gaps inside."""
        draw, mask = self.random, torch.zeros(rows, width)
        for row in mask:
            row[: draw.randint(1, width)] = 1
            if gaps:
                row[draw.randint(1, width - 1)] = 0
        return mask

    def draw_policy(
        self, rows: int, width: int, *, spread: float = 1.0, per_row: bool = False
    ) -> dict[str, Any]:
        """Log-probabilities, old ones within `spread` nats of them, advantages, and a mask."""
        logprobs = -2 * self.random_tensor(rows, width).abs() - 0.05
        advantages = self.random_tensor(rows, 1 if per_row else width).expand(rows, width)
        mask = self.draw_mask(rows, width)
        old = (logprobs + spread * self.random_tensor(rows, width)).clamp(max=-0.01)
        return {
            "logprobs": logprobs,
            "old_logprobs": old,
            "advantages": (advantages * mask).clone(),
            "mask": mask,
        }

    @staticmethod
    def give_scores(scores: Any, mask: Any, groups: Any) -> dict[str, Any]:
        """Inputs of an estimator of one score per row."""
        return {"global_rewards": scores, "mask": mask, "group_ids": groups}

    def write(self) -> None:
        """Writes the file that the command line names, one record per line."""
        lists = {"examples": self._examples, "differences": self._differences, **self._lists}
        parts = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in self._head.items()]
        for name, entries in lists.items():
            lines = ",\n".join(f"  {json.dumps(entry, ensure_ascii=False)}" for entry in entries)
            parts.append(f"{json.dumps(name)}: [\n{lines}\n]" if entries else f'"{name}": []')
        Path(sys.argv[2]).write_text("{" + ",\n".join(parts) + "}\n", encoding="utf-8")
