"""Measuring: how long does a candidate take, if it is right?

One process holds the device; there candidates are verified (`schedsearch.verification`) and timed. It knows no operator by
name, and does not decide what to measure next.
"""

from schedsearch.measure.lock import DeviceLock
from schedsearch.measure.runner import Runner
from schedsearch.processes.builder import Builder, Built, Candidate

__all__ = ["Builder", "Built", "Candidate", "DeviceLock", "Runner"]
