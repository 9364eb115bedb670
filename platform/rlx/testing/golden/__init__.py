"""Worked examples, computed by rlx and compared: `python -m rlx.testing.golden FILE`.

A record holds `inputs`, `config` and the `outputs` that someone worked out. Every output is
computed anew by rlx's own public functions, from inputs and config alone, and compared. An output
that nothing here computes is unknown, and said to be. Where a record tabulates (`rows`), the
columns that ask are read from the table, and those that answer are computed.
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
