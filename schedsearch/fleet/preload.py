"""What a Dask worker loads to be a worker of a fleet: `dask worker --preload schedsearch.fleet.preload`."""

from __future__ import annotations

import logging
import threading
from typing import Any

from schedsearch.fleet import host


def dask_setup(worker: Any) -> None:
    """Looks at devices and compilers ahead of the first question, which takes seconds."""
    # A worker that ends in the middle of a build warns about its own coroutine, which nobody can do anything about.
    logging.getLogger("distributed.worker.state_machine").setLevel(logging.ERROR)
    threading.Thread(target=host.describe, name="schedsearch-describe", daemon=True).start()


def dask_teardown(worker: Any) -> None:
    """Frees the devices."""
    host.the_host().close()
