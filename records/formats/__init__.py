"""Files of other tuners, read and written as records."""

FORMATS = ("jsonl", "kernel-tuner", "t4", "autotvm")
"""Formats of files of records: our own complete one, then those of other tuners."""
