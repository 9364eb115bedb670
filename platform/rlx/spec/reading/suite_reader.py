"""Reads one YAML file into a `SuiteSpec`."""

from pathlib import Path

from pydantic import ValidationError
from pydantic_core import to_json

from rlx.spec.reading.diagnostics import build_refusal
from rlx.spec.reading.explain import explain_validation_error
from rlx.spec.reading.extends import read_mapping
from rlx.spec.reading.locations import locate_diagnostic
from rlx.spec.suite import SuiteSpec

__all__ = ["read_suite"]


def read_suite(path: Path) -> SuiteSpec:
    """Reads and validates one suite, without the values that its sets change.

    Raises:
        InvalidSpec: lists every error in the file.
        SpecError: the file cannot be opened.
    """
    document = read_mapping(path)
    try:
        return SuiteSpec.model_validate_json(to_json(document.tree), strict=True)
    except ValidationError as error:
        faults = explain_validation_error(error, SuiteSpec, document.tree)
        raise build_refusal(
            [locate_diagnostic(f, document) for f in faults], document.file
        ) from None
