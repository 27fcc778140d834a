"""The environment for Python processes that tests start."""

from __future__ import annotations

import os
from pathlib import Path


def child_environment(**more: str) -> dict[str, str]:
    """This process's environment, with the tests' folder first on PYTHONPATH."""
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **more}
