"""Measuring: is a candidate right, and how long does it take?

Candidates are built in a pool of processes, and verified and timed in one process that holds the device. It knows no
operator by name, and does not decide what to measure next.
"""

from schedsearch.measure.builder import Builder, Built, Candidate
from schedsearch.measure.lock import DeviceLock
from schedsearch.measure.runner import Runner

__all__ = ["Builder", "Built", "Candidate", "DeviceLock", "Runner"]
