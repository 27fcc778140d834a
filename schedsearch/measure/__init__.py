"""Measuring: candidates are built in a pool of processes, and verified and timed in one process that holds the device."""

from schedsearch.measure.builder import Builder, Built, Candidate
from schedsearch.measure.lock import DeviceLock
from schedsearch.measure.runner import Runner

__all__ = ["Builder", "Built", "Candidate", "DeviceLock", "Runner"]
