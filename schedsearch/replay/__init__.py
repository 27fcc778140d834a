"""Replays searches over recorded data, without a device: how good is a tuner?

It knows tuners and spaces. Templates, devices and the store do not belong here.
"""

from __future__ import annotations

from schedsearch.replay.figures import Report, Run, differences, summarise, to_json
from schedsearch.replay.recorded import Loaded, RecordedSpace, load
from schedsearch.replay.search import cold_spaces, replay, run

__all__ = [
    "Loaded",
    "RecordedSpace",
    "Report",
    "Run",
    "cold_spaces",
    "differences",
    "load",
    "replay",
    "run",
    "summarise",
    "to_json",
]
