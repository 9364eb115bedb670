"""Recomputes worked examples with rlx and compares: `python -m rlx.testing.golden FILE`.

A record holds `inputs`, `config` and the expected `outputs`. Every output is recomputed by rlx's
public functions from inputs and config alone. An output without a matching calculation is reported
as unknown. If a record is a table (`rows`), its input columns are read and its output columns are
recomputed.
"""

from rlx.testing.golden.check import GoldenFinding, check_golden_record
from rlx.testing.golden.record import GoldenRecord, GoldenRecords, read_golden_records

__all__ = [
    "GoldenFinding",
    "GoldenRecord",
    "GoldenRecords",
    "check_golden_record",
    "read_golden_records",
]
