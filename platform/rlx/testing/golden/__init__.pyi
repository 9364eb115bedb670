from .check import GoldenFinding, check_golden_record
from .functions import GoldenFunction, find_golden_function, list_golden_functions
from .record import GoldenRecord, GoldenRecords, read_golden_records

__all__ = [
    "GoldenFinding",
    "GoldenFunction",
    "GoldenRecord",
    "GoldenRecords",
    "check_golden_record",
    "find_golden_function",
    "list_golden_functions",
    "read_golden_records",
]
