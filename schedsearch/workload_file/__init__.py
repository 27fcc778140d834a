"""workload.yaml: what to tune, for which device, with what budget.

It reads, checks and writes the file, and names the place of every mistake. It plans and runs nothing.
"""

from __future__ import annotations

from schedsearch.workload_file.reader import WorkloadFile, load, parse
from schedsearch.workload_file.schema import Budget, MeasureOptions, TunerChoice, json_schema, parse_duration_s
from schedsearch.workload_file.writer import dump
from schedsearch.workload_file.yaml_source import WorkloadFileError

__all__ = [
    "Budget",
    "MeasureOptions",
    "TunerChoice",
    "WorkloadFile",
    "WorkloadFileError",
    "dump",
    "json_schema",
    "load",
    "parse",
    "parse_duration_s",
]
