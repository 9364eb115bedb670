"""Reads YAML into a validated `ExperimentSpec` and reports every error with its line.

Covers YAML parsing, source locations of keys, `key=value` overrides, and the translation of
Pydantic errors for authors of YAML. Input: files and overrides. Output: a spec or diagnostics.
"""

from rlx.spec.reading.diagnostics import (
    Diagnostic,
    FaultKind,
    InvalidSpec,
    SourceLocation,
    build_error,
    build_refusal,
    build_warning,
    count_errors,
    did_you_mean,
    format_diagnostic,
    format_key_path,
    label_refusal,
    suggest_name,
)
from rlx.spec.reading.examples import find_examples
from rlx.spec.reading.explain import explain_validation_error
from rlx.spec.reading.extends import read_own_values
from rlx.spec.reading.locations import locate_diagnostic, relocate_phase_fault
from rlx.spec.reading.reader import (
    LoadedSpec,
    apply_overrides,
    list_leaf_values,
    read_document,
)
from rlx.spec.reading.suite_reader import read_suite
from rlx.spec.reading.yaml_source import YamlDocument, parse_yaml_document

__all__ = [
    "Diagnostic",
    "FaultKind",
    "InvalidSpec",
    "LoadedSpec",
    "SourceLocation",
    "YamlDocument",
    "apply_overrides",
    "build_error",
    "build_refusal",
    "build_warning",
    "count_errors",
    "did_you_mean",
    "explain_validation_error",
    "find_examples",
    "format_diagnostic",
    "format_key_path",
    "label_refusal",
    "list_leaf_values",
    "locate_diagnostic",
    "parse_yaml_document",
    "read_document",
    "read_own_values",
    "read_suite",
    "relocate_phase_fault",
    "suggest_name",
]
