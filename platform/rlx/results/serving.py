"""Opens a model for requests: one of a run, of a checkpoint, or of a folder."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import ValidationError
from pydantic_core import to_json

from rlx.errors import SpecError
from rlx.launch import RUN_LIKE
from rlx.model import check_model_files
from rlx.plugin import StrictModel, expand_path
from rlx.results.models import load_sampler, open_target
from rlx.results.requests import check_sections
from rlx.sampler import SamplingEngine
from rlx.serving import ServedModel
from rlx.spec import ExperimentSpec, PretrainedModelSpec, RunnerSpec, SamplerSpec
from rlx.spec.reading import (
    YamlDocument,
    apply_overrides,
    build_refusal,
    explain_validation_error,
    locate_diagnostic,
    parse_yaml_document,
)
from rlx.text import escape_unprintable
from rlx_registry import RunRecord

STEP = re.compile(r"latest|[0-9]{1,10}")
FREE = ("runner", "sampler")


class EngineSettings(StrictModel):
    """The sections of an experiment that say where and how a model is sampled."""

    runner: RunnerSpec = RunnerSpec.model_construct()
    sampler: SamplerSpec


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A model that answers requests.

    Attributes:
        model: turns requests into tokens, and samples into texts.
        engine: samples with its weights.
        max_rows: completions that the engine decodes together.
        folder: the model's folder, GGUF file, or name on the hub.
        run: the run that trained it, if one was named.
        step: of its checkpoint; None for the trained model.
    """

    model: ServedModel
    engine: SamplingEngine
    max_rows: int
    folder: str
    run: RunRecord | None = None
    step: int | None = None


@contextmanager
def open_served_model(
    name: str, overrides: Sequence[str], url: str, max_tokens: int
) -> Iterator[OpenModel]:
    """Loads a model and starts its engine, which ends with the block.

    Args:
        name: `RUN`, the trained model of a run; `RUN@STEP` or `RUN@latest`, a checkpoint; or a
            model's folder, GGUF file, or name on the hub.
        overrides: `key=value` of the sections `runner` and `sampler`; a run has its own values.
        url: URL of the registry of runs.
        max_tokens: maximum length of a message whose request does not say it, in tokens.

    Raises:
        SpecError: there is no such run, model or checkpoint.
        InvalidSpec: an override does not fit.
        EnvironmentFault: model files, the engine or the device are missing.
    """
    check_sections(overrides, FREE, f"of what is served, only {' and '.join(FREE)} may be changed")
    run, _, step = name.partition("@")
    if expand_path(name).exists() or not RUN_LIKE.fullmatch(run):
        source = PretrainedModelSpec(path=name)
        check_model_files(source)
        settings = _read_settings(parse_yaml_document("sampler: {}", "the defaults"), overrides)
        with _open(name, Path(name).name, source, settings, max_tokens) as opened:
            yield opened
        return
    if step and not STEP.fullmatch(step):
        raise SpecError(f"{escape_unprintable(name)}: write RUN@STEP with a number, or RUN@latest")
    at = int(step) if step.isdigit() else step or None
    with open_target(run, None, url, at) as found:
        own = ExperimentSpec.model_validate_json(to_json(found.document.tree)).model
        chat = isinstance(own, PretrainedModelSpec) and own.chat_template
        source = PretrainedModelSpec(path=found.model, chat_template=chat)
        settings = _read_settings(found.document, overrides)
        with _open(found.name, name, source, settings, max_tokens) as opened:
            yield replace(opened, run=found.run, step=found.step)


def _read_settings(document: YamlDocument, overrides: Sequence[str]) -> EngineSettings:
    """Returns the sections of a document that say how a model is sampled, with overrides."""
    document = apply_overrides(document, overrides)
    tree = document.tree if isinstance(document.tree, dict) else {}
    own = {name: tree[name] for name in FREE if name in tree}
    try:
        return EngineSettings.model_validate_json(to_json(own), strict=True)
    except ValidationError as error:
        faults = explain_validation_error(error, EngineSettings, own)
        located = [locate_diagnostic(fault, document) for fault in faults]
        raise build_refusal(located, document.file) from None


@contextmanager
def _open(
    name: str, alias: str, source: PretrainedModelSpec, settings: EngineSettings, max_tokens: int
) -> Iterator[OpenModel]:
    runner, sampler = settings.runner, settings.sampler
    dtype = getattr(torch, runner.dtype)
    with load_sampler(source, runner, sampler, dtype) as (policy, engine):
        with engine.session() as session:
            length = session.context_length
        model = ServedModel(
            name,
            policy,
            length,
            aliases=frozenset({alias}),
            min_temperature=sampler.min_temperature,
            max_tokens=max_tokens,
        )
        yield OpenModel(model, engine, sampler.max_rows, source.path)
