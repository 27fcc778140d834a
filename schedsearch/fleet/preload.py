"""What a Dask worker loads to be a worker of a fleet: `dask worker --preload schedsearch.fleet.preload`."""

from __future__ import annotations

import threading
from typing import Any

from schedsearch.fleet import host


def dask_setup(worker: Any) -> None:
    """Looks at devices and compilers ahead of the first question, which takes seconds."""
    threading.Thread(target=host.describe, name="schedsearch-describe", daemon=True).start()


def dask_teardown(worker: Any) -> None:
    """Frees the devices."""
    host.the_host().close()
