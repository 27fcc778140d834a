"""Makes the wall clock of a child process jump. Processes of a run find this file by PYTHONPATH."""

import os
import random
import time

_random = random.Random(os.environ.get("FAULTS_CLOCK", "0"))
_real, _offset_s = time.time, 0.0


def _jumping() -> float:
    global _offset_s
    if _random.random() < 0.2:
        _offset_s = _random.choice([-1, 1]) * 10 ** _random.uniform(-2, 9)
    return max(_real() + _offset_s, 0.0)


time.time = _jumping
