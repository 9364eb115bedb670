"""Worked examples, and the functions of rlx that they name: `python tests/golden_records.py FILE`.

A record names a function of rlx, its inputs and options, and the outputs that are expected:

    {"function": "credit.group_advantages", "inputs": {"scores": [1, 0], "group_ids": ["a", "a"]},
     "options": {"ddof": 0}, "outputs": {"value": [1, -1]}}

A function is an estimator, mask or reward by its YAML name, or a public function of the rooms that
hold the mathematics.
"""

import inspect
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import click
import numpy as np
import torch
from pydantic import TypeAdapter
from torch import Tensor

from rlx.batch import NO_TURN, TokenBatch
from rlx.credit import CreditInputs
from rlx.discovery import Kind, build_plugin, list_installed_plugins
from rlx.errors import RlxError, SpecError
from rlx.loss import aggregation_weights, compute_token_losses, select_covariant_tokens
from rlx.plugin import Placement, Sample
from rlx.spec import LossSpec, PluginUse
from rlx.testing.promise import bind_subject
from rlx.text import escape_unprintable
from rlx_registry import STREAMS


def agrees(got: Any, expected: Any, rtol: float, atol: float) -> bool:
    """Whether a value agrees with what is expected, to within the tolerances.

    An object agrees if every key that is expected does. null in a list agrees with anything: what
    stands outside a mask is not compared.
    """
    if isinstance(expected, Mapping):
        return isinstance(got, Mapping) and all(
            key in got and agrees(got[key], value, rtol, atol) for key, value in expected.items()
        )
    if isinstance(expected, list):
        return (
            isinstance(got, list)
            and len(got) == len(expected)
            and all(
                e is None or agrees(g, e, rtol, atol) for g, e in zip(got, expected, strict=True)
            )
        )
    if isinstance(expected, int | float) and isinstance(got, int | float):
        return got == expected or math.isclose(got, expected, rel_tol=rtol, abs_tol=atol)
    return type(got) is type(expected) and bool(got == expected)


_BOOLEANS = ("mask", "contents", "turn_present")
_CREDIT_FIELDS = tuple(field.name for field in fields(CreditInputs) if field.name != "streams")
_STREAM_OUTPUTS = tuple(sorted({stream.name for stream in STREAMS.values() if stream.is_output}))
_PLAIN = ("reward_weights", "score_source", "state")
_INTEGERS = ("rows", "kinds", "lengths", "levels", "slot")


def parse_tensor(name: str, value: Any) -> Tensor:
    """An array of a record, or a tensor, as the tensor that an argument of this name takes.

    Masks and `is_*` become bool, ids, levels and counts int64, everything else float64. Ids may be
    text, which is numbered in order of appearance. null in a number is NaN.

    Raises:
        SpecError: it is no array of one shape.
    """
    if isinstance(value, Tensor):
        return value
    try:
        if name in _BOOLEANS or name.startswith("is_"):
            return torch.tensor(value, dtype=torch.float64) != 0
        if name.endswith("_ids"):
            return torch.tensor(_number_ids(value, {}), dtype=torch.int64)
        if name in _INTEGERS:
            return torch.tensor(value, dtype=torch.int64)
        return torch.tensor(_replace_nulls(value), dtype=torch.float64)
    except (TypeError, ValueError) as error:
        raise SpecError(f"{name}: {error}") from error


def _number_ids(value: Any, seen: dict[str, int]) -> Any:
    if isinstance(value, list):
        return [_number_ids(each, seen) for each in value]
    return seen.setdefault(value, len(seen)) if isinstance(value, str) else value


def _replace_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_replace_nulls(each) for each in value]
    return float("nan") if value is None else value


def build_credit_inputs(inputs: Mapping[str, Any]) -> CreditInputs:
    """The inputs of an estimator, from those that a record gives.

    What is left out is neutral: one token per row, one turn that covers the mask, one group, no
    rewards. A null in `turn_rewards` is a turn that was not rewarded.

    Raises:
        SpecError: nothing tells the number of rows, or a name is unknown.
    """
    known = [*_CREDIT_FIELDS, *_STREAM_OUTPUTS]
    if unknown := sorted(inputs.keys() - set(known)):
        raise SpecError(f"{unknown[0]!r} is none of an estimator's inputs: {', '.join(known)}")
    named: dict[str, Any] = {
        name: value if name in _PLAIN else parse_tensor(name, value)
        for name, value in inputs.items()
        if value is not None
    }
    rows = next((len(value) for value in named.values() if isinstance(value, Tensor)), None)
    if rows is None:
        raise SpecError("an estimator needs at least one input with a value per row")
    mask = named.setdefault("mask", torch.ones(rows, 1, dtype=torch.bool))
    rewards = named.setdefault("turn_rewards", torch.zeros(rows, 0, dtype=torch.float64))
    named.setdefault("turn_present", ~rewards.isnan())
    named["turn_rewards"] = rewards.nan_to_num(0.0)
    groups = named.setdefault("group_ids", torch.zeros(rows, dtype=torch.int64))
    defaults: dict[str, Any] = {
        "global_rewards": torch.zeros(rows, dtype=torch.float64),
        "token_rewards": torch.zeros(mask.shape, dtype=torch.float64),
        "turn_ids": torch.where(mask, 1, NO_TURN),
        "levels": torch.zeros(rows, dtype=torch.int64),
        "tree_ids": groups,
        "state_ids": torch.full(rewards.shape, NO_TURN),
    }
    streams = {name: named.pop(name) for name in _STREAM_OUTPUTS if name in named}
    return CreditInputs(**{**defaults, **named}, streams=streams)


def build_mask_batch(inputs: Mapping[str, Any]) -> TokenBatch:
    """A batch for a mask strategy, from `is_own` and what else a record gives.

    What is left out is neutral: no environment, no end, no span, one turn.

    Raises:
        SpecError: `is_own` is missing, or a name is unknown.
    """
    known = [field.name for field in fields(TokenBatch)]
    if unknown := sorted(inputs.keys() - set(known)):
        raise SpecError(f"{unknown[0]!r} is none of a mask's inputs: {', '.join(known)}")
    if "is_own" not in inputs:
        raise SpecError("a mask needs `is_own`, [B, T]")
    named: dict[str, Any] = {
        name: {span: parse_tensor("is_span", tokens) for span, tokens in value.items()}
        if isinstance(value, dict)
        else parse_tensor(name, value)
        for name, value in inputs.items()
    }
    own = named["is_own"]
    nothing, rows = torch.zeros_like(own), torch.arange(len(own))
    defaults = {
        "rows": (),
        "token_ids": torch.zeros(own.shape, dtype=torch.int64),
        "is_token": torch.ones_like(own),
        **dict.fromkeys(("is_environment", "is_end", "is_hull"), nothing),
        "turn_ids": torch.where(own, 1, NO_TURN),
        "spans": {},
        "contents": {},
        "behaviour_logprobs": torch.zeros(own.shape),
        "temperatures": torch.ones(own.shape),
        "group_ids": torch.zeros_like(rows),
        "levels": torch.zeros_like(rows),
        "tree_ids": rows,
        "state_ids": torch.zeros(len(rows), 1, dtype=torch.int64),
    }
    return TokenBatch(**{**defaults, **named})


def build_samples(inputs: Mapping[str, Any]) -> Sample | tuple[Sample, ...]:
    """What a reward scores: one sample, or several of a wider scope under `samples`.

    Raises:
        SpecError: a name is unknown.
    """
    if "samples" in inputs:
        return tuple(_build_sample(each, f"s{n}") for n, each in enumerate(inputs["samples"]))
    return _build_sample(inputs, "s")


def _build_sample(inputs: Mapping[str, Any], id: str) -> Sample:
    known = [field.name for field in fields(Sample)]
    if unknown := sorted(inputs.keys() - set(known)):
        raise SpecError(f"{unknown[0]!r} is none of a sample's fields: {', '.join(known)}")
    defaults = {"id": id, "problem": {}, "turn": "answer", "number": 1, "response": ""}
    return Sample(**{**defaults, **inputs})


def unpack_result(result: Any) -> dict[str, Any]:
    """A function's result as outputs by name: the fields of a record, or else `value`."""
    if is_dataclass(result) and not isinstance(result, type):
        return {field.name: _unpack_value(getattr(result, field.name)) for field in fields(result)}
    if isinstance(result, tuple) and hasattr(result, "_asdict"):
        return {name: _unpack_value(value) for name, value in result._asdict().items()}
    return {"value": _unpack_value(result)}


def _unpack_value(value: Any) -> Any:
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(name): _unpack_value(each) for name, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [
            unpack_result(each)
            if hasattr(each, "_asdict") or is_dataclass(each)
            else _unpack_value(each)
            for each in value
        ]
    return value


LOSS_INPUTS = ("logprobs", "old_logprobs", "advantages", "mask", "choice_logprobs", "lengths")


def compute_policy_loss(inputs: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """`value`, the loss without penalties, and `gradient`, `[B, T]` by the log-probabilities.

    Args:
        inputs: `logprobs`, `old_logprobs`, `advantages` and `mask`, `[B, T]`; `choice_logprobs`
            from which `covariance` chooses, by default the old ones; `lengths` `[B]` for
            `aggregate: constant`.
        options: keys of `loss`.

    Raises:
        SpecError: an input is missing or unknown.
    """
    if unknown := sorted(inputs.keys() - set(LOSS_INPUTS)):
        raise SpecError(f"{unknown[0]!r} is none of a loss's inputs: {', '.join(LOSS_INPUTS)}")
    if missing := [name for name in LOSS_INPUTS[:4] if name not in inputs]:
        raise SpecError(f"a loss needs {', '.join(missing)}")
    spec = TypeAdapter(LossSpec).validate_python(dict(options))
    given = {name: parse_tensor(name, value) for name, value in inputs.items()}
    logprobs, old, advantages, mask = (given[name] for name in LOSS_INPUTS[:4])
    logprobs = logprobs.clone().requires_grad_()
    covariant = None
    if spec.covariance is not None:
        choice = given.get("choice_logprobs", old)
        chosen = select_covariant_tokens(advantages, choice, mask, spec.covariance, seed=0)
        covariant = chosen[mask]
    rows = mask.nonzero()[:, 0]
    losses = compute_token_losses(
        logprobs[mask], old[mask], advantages[mask], rows, spec, covariant
    ).losses
    weights = aggregation_weights(
        mask,
        torch.zeros(len(mask), dtype=torch.int64),
        aggregate=spec.aggregate,
        per_turn=spec.per_turn,
        constant_lengths=given.get("lengths"),
    )
    value = (weights[mask] * losses).sum()
    (gradient,) = torch.autograd.grad(value, logprobs)
    return {"value": value.item(), "gradient": gradient.tolist()}


_ROOMS = ("rlx.credit", "rlx.kl", "rlx.loss", "rlx.evaluation", "rlx.probe", "rlx.reward")
_KINDS: tuple[Kind, ...] = ("estimator", "mask", "reward")
_ARGUMENTS = {Tensor, int, float, bool, str, type(None), Placement, CreditInputs}
"""Types of arguments that JSON can hold: placements by name, inputs of estimators in parts."""
GoldenFunction = Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]
"""Takes inputs and options, as JSON has them; returns outputs by name."""


def find_golden_function(name: str) -> GoldenFunction:
    """Finds a function by its name, in any case; `rlx.` may precede it, as in an import.

    Raises:
        SpecError: there is none; names the nearest.
        PluginFault: it is a plugin that cannot be imported.
    """
    rooms, plugins = _list_room_functions(), _list_plugins()
    named = {**rooms, "losses.policy": compute_policy_loss}
    folded = {known.casefold(): known for known in (*named, *plugins)}
    name = folded.get(name.casefold().removeprefix("rlx."), name)
    if name in named:
        return named[name]
    if name in plugins:
        return partial(_call_plugin, *plugins[name])
    known = [*named, *plugins]
    near = [other for other in known if other.partition(".")[2] == name.rpartition(".")[2]]
    near = near or get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {len(known)} others"
    raise SpecError(f"no function is called {name!r}: {hint}")


@lru_cache(maxsize=1)
def _list_room_functions() -> dict[str, GoldenFunction]:
    found: dict[str, GoldenFunction] = {}
    for room in _ROOMS:
        module = import_module(room)
        own = [n for n, f in vars(module).items() if getattr(f, "__module__", "") == room]
        for short in getattr(module, "__all__", own):  # a room of one file has no list
            function = getattr(module, short)
            if (
                not short.startswith("_")
                and inspect.isfunction(function)
                and _takes_plain_values(function)
            ):
                name = f"{room.removeprefix('rlx.')}.{short}"
                found[name] = partial(_call_room_function, function)
    return found


def _list_plugins() -> dict[str, tuple[Kind, str]]:
    return {
        f"{kind}s.{found.name}": (kind, found.name)
        for kind in _KINDS
        for found in list_installed_plugins(kind)
    }


# Functions of rooms ------------------------------------------------------------------------------


def _takes_plain_values(function: Callable[..., Any]) -> bool:
    """Whether JSON can hold all of its arguments."""
    try:
        hints = get_type_hints(function)
    except NameError:  # it returns what only a type checker imports, such as a picture
        return False
    hints.pop("return", None)
    return all(_is_plain(hint) for hint in hints.values())


def _is_plain(hint: Any) -> bool:
    if getattr(hint, "__name__", "") == "Literal" or hint in _ARGUMENTS or _is_array(hint):
        return True
    inner = get_args(hint)
    return bool(inner) and all(map(_is_plain, inner))


def _is_array(hint: Any) -> bool:
    return "numpy._typing" in str(hint)


def _call_room_function(
    function: Callable[..., Any], inputs: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    hints = get_type_hints(function)
    arguments: dict[str, Any] = {}
    if CreditInputs in hints.values():
        arguments["inputs"], inputs = build_credit_inputs(inputs), {}
    for name, value in (*inputs.items(), *options.items()):
        if name in arguments:
            raise SpecError(f"{name!r} is both an input and an option")
        if hints.get(name) is Placement:
            value = build_plugin(PluginUse(plugin=value), "placement")
        is_tensor = Tensor in (hints.get(name), *get_args(hints.get(name)))
        arguments[name] = parse_tensor(name, value) if is_tensor and value is not None else value
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise SpecError(str(error)) from error
    return unpack_result(function(**arguments))


# Plugins -----------------------------------------------------------------------------------------


def _call_plugin(
    kind: Kind, plugin: str, inputs: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    call = {"estimator": _call_estimator, "mask": _call_mask, "reward": _call_reward}[kind]
    return call(build_plugin(PluginUse(plugin=plugin, **options), kind), inputs)


def _call_estimator(plugin: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Advantages `[B, T]`, and what else the estimator gives."""
    result = bind_subject(plugin)(build_credit_inputs(inputs))
    return {"advantages": result.tolist()} if isinstance(result, Tensor) else unpack_result(result)


def _call_mask(plugin: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {"mask": bind_subject(plugin)(build_mask_batch(inputs)).int().tolist()}


def _call_reward(plugin: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a score; lists of them for several samples."""
    samples = build_samples(inputs)
    if not isinstance(samples, tuple):
        return _unpack_verdict(plugin.score(samples))
    verdicts = [_unpack_verdict(verdict) for verdict in plugin.score(samples)]
    return {name: [v[name] for v in verdicts] for name in ("value", "reason", "parts")}


def _unpack_verdict(verdict: Any) -> dict[str, Any]:
    if verdict is None or isinstance(verdict, int | float):
        return {"value": verdict, "reason": None, "parts": {}}
    return unpack_result(verdict)


_CASE_KEYS = ("id", "response", "numbers", "target", "expected")


@dataclass(frozen=True, kw_only=True)
class GoldenRecord:
    """One worked example.

    Attributes:
        function: name of the function.
        inputs: its arrays, as nested lists.
        options: its settings.
        outputs: expected values by name; null inside a list is not compared.
        id: name of the record.
        title: what it shows.
        source: where the outputs come from.
        notes: anything else.
    """

    function: str
    outputs: Mapping[str, Any]
    inputs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""
    title: str = ""
    source: str = ""
    notes: str = ""


@dataclass(frozen=True)
class GoldenRecords:
    """The records of a file, with their tolerances."""

    examples: tuple[GoldenRecord, ...]
    rtol: float = 1e-6
    atol: float = 1e-9


def read_golden_records(path: Path) -> GoldenRecords:
    """Reads `{rtol, atol, examples: [...]}`, a list of records, one record, or one per line.

    A line of a file `*.jsonl` may also be a scored Countdown answer, `{id, response, numbers,
    target, expected}`: `expected` is the score by the default rule, and `expected_source` that by
    TinyZero's own rule, where the two differ.

    Raises:
        SpecError: the file cannot be read or has another form.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise SpecError(f"{path} cannot be read: {error}") from error
    if path.suffix == ".jsonl":
        return GoldenRecords(tuple(_parse_lines(path, text)))
    content = _parse_json(text, str(path))
    whole = content if isinstance(content, dict) and "examples" in content else {}
    examples = whole.get("examples", content if isinstance(content, list) else [content])
    tolerances = {key: float(whole[key]) for key in ("rtol", "atol") if key in whole}
    return GoldenRecords(
        tuple(
            _parse_record(example, f"{path}: record {number}")
            for number, example in enumerate(examples, start=1)
        ),
        **tolerances,
    )


def _parse_lines(path: Path, text: str) -> Iterator[GoldenRecord]:
    # Not `splitlines`: a response may hold a line separator of Unicode.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{path} line {number}"
            entry = _parse_json(line, where)
            if isinstance(entry, dict) and "function" in entry:
                yield _parse_record(entry, where)
            else:
                yield from _parse_countdown_case(entry, where)


def _parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise SpecError(f"{where}: not JSON: {error}") from error


def _parse_record(entry: Any, where: str) -> GoldenRecord:
    if not isinstance(entry, dict) or not {"function", "outputs"} <= set(entry):
        raise SpecError(
            f"{where} is not an object with 'function' and 'outputs', such as "
            '{"function": "credit.group_advantages", "inputs": {…}, "options": {…}, '
            '"outputs": {…}}'
        )
    known = GoldenRecord.__dataclass_fields__
    if unknown := sorted(entry.keys() - set(known)):
        raise SpecError(f"{where}: {unknown[0]!r} is none of {', '.join(known)}")
    for name in ("inputs", "options", "outputs"):
        if not isinstance(entry.get(name, {}), dict):
            raise SpecError(f"{where}: {name!r} must be an object")
    return GoldenRecord(**{"id": where.rpartition(" ")[2], **entry})


def _parse_countdown_case(case: Any, where: str) -> Iterator[GoldenRecord]:
    """Yields the record of a scored answer by each of the two rules."""
    lacking = [key for key in _CASE_KEYS if not isinstance(case, dict) or key not in case]
    if lacking:
        raise SpecError(f"{where}: a Countdown case also needs {lacking[0]!r}")
    problem = {"numbers": case["numbers"], "target": case["target"]}
    source = case.get("expected_source", case["expected"])
    rules: tuple[tuple[str, dict[str, Any], Any], ...] = (
        ("", {}, case["expected"]),
        (", source", {"allow_decimals": True}, source),
    )
    for rule, options, expected in rules:
        yield GoldenRecord(
            function="rewards.countdown",
            inputs={"response": case["response"], "problem": problem},
            options=options,
            outputs={"value": expected},
            id=f"{case['id']}{rule}",
            title=str(case.get("note", "")),
        )


Status = Literal["ok", "differs", "unknown"]

_REFUSED = (
    *(LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError),
    RlxError,
)
"""Exceptions that a function raises on inputs of an unexpected form."""


@dataclass(frozen=True)
class GoldenFinding:
    """Result for one output.

    Attributes:
        record: id of the record.
        output: name of the output.
        status: "ok"; "differs"; "unknown" if rlx has no such function or output, or if the function
            refuses the inputs.
        got: the value from rlx; None if it was not computed.
        expected: the value of the record.
        reason: why it is unknown.
    """

    record: str
    output: str
    status: Status
    got: Any
    expected: Any
    reason: str | None = None


def check_golden_record(
    record: GoldenRecord, *, rtol: float = 1e-6, atol: float = 1e-9
) -> Iterator[GoldenFinding]:
    """Calls the function of a record once and compares every output.

    Args:
        record: the worked example.
        rtol: relative tolerance.
        atol: absolute tolerance.
    """
    got, reason = _compute_outputs(record)
    for output, expected in record.outputs.items():
        if output in got:
            status: Status = "ok" if agrees(got[output], expected, rtol, atol) else "differs"
            yield GoldenFinding(record.id, output, status, got[output], expected)
        else:
            why = reason or f"{record.function} gives {', '.join(got)}"
            yield GoldenFinding(record.id, output, "unknown", None, expected, why)


def _compute_outputs(record: GoldenRecord) -> tuple[dict[str, Any], str | None]:
    """Outputs by name; none, and the reason, if they cannot be computed."""
    try:
        return find_golden_function(record.function)(record.inputs, record.options), None
    except _REFUSED as error:
        return {}, str(error) or type(error).__name__


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
def main(file: Path) -> None:
    """Recompute the worked examples of FILE and compare them.

    Exits with 0 only if every output agrees and none is unknown.
    """
    records = read_golden_records(file)
    found = [
        (record, list(check_golden_record(record, rtol=records.rtol, atol=records.atol)))
        for record in records.examples
    ]
    for record, findings in found:
        _show_record(record, findings)
    counts = Counter(f.status for _, findings in found for f in findings)
    statuses = ", ".join(f"{counts[s]} {s}" for s in ("ok", "differs", "unknown"))
    click.echo(f"{len(found)} records; outputs: {statuses}")
    raise SystemExit(int(counts["ok"] != counts.total() or not found))


def _show_record(record: GoldenRecord, findings: Iterable[GoldenFinding]) -> None:
    click.echo(escape_unprintable(f"{record.id}  {record.function}  {record.title}"))
    for finding in findings:
        click.echo(escape_unprintable(f"  {finding.status:8}{finding.output}"))
        if finding.reason is None:
            click.echo(
                escape_unprintable(f"            got       {_format_output_value(finding.got)}")
            )
        click.echo(
            escape_unprintable(f"            expected  {_format_output_value(finding.expected)}")
        )
        if finding.reason is not None:
            click.echo(escape_unprintable(f"            {finding.reason}"))


def _format_output_value(value: Any) -> str:
    if isinstance(value, dict):
        return (
            "{" + ", ".join(f"{key}: {_format_output_value(v)}" for key, v in value.items()) + "}"
        )
    if isinstance(value, list):
        return "[" + ", ".join(map(_format_output_value, value)) + "]"
    return f"{value:.9g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
