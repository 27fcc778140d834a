"""Keeps a shipped configuration in the user's database once its kernel was built and verified on this machine."""

from __future__ import annotations

from pathlib import Path

from schedsearch.config import Config
from schedsearch.errors import DatabaseError
from schedsearch.launch import Artifact
from schedsearch.measurement import Measurement, Outcome, Record
from schedsearch.records.lookup import LookupRow
from schedsearch.records.shipped import Shipped
from schedsearch.records.store import Store
from schedsearch.workload import Workload

_PATIENCE_S = 0.5  # for another process that writes; the kernel is there, so that nothing else waits


def keep_shipped(db: Path, workload: Workload, row: LookupRow, shipped: Shipped, artifact: Artifact) -> bool:
    """Adds a shipped record with the code that this machine made of it and verified, as the best of its task.

    Its time is the one that was shipped; `records verify` measures it here.

    Returns:
        Whether it is kept. It is not if the task has a best by now, or if the database cannot be written.
    """
    made_at = shipped.manifest.get("made_at")
    made_at = float(made_at) if isinstance(made_at, int | float) else 0.0
    toolchain = shipped.manifest.get("toolchain")
    record = Record(
        workload=workload,
        target=row.target_key,
        template=row.template,
        template_version=row.template_version,
        config=Config.from_json(row.config_json),
        measurement=Measurement(Outcome.OK, mode=row.mode, times_ns=(row.time_ns,)),
        toolchain={str(name): str(value) for name, value in toolchain.items()} if isinstance(toolchain, dict) else {},
        started_at=made_at,
        finished_at=made_at,
        source=f"shipped: {shipped.name}",
    )
    try:
        with Store.open(db, create=False, busy_timeout_s=_PATIENCE_S) as store:
            return store.adopt(record, artifact)
    except DatabaseError:  # read-only, locked, or full: the next call builds the kernel again
        return False
