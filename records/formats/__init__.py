"""Reads and writes files of other tuners as records."""

FORMATS = ("jsonl", "kernel-tuner", "t4", "autotvm")
"""Formats of files of records: our own complete one, then those of other tuners."""
