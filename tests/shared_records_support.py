"""Records of races that never ran, and the command on them."""

from __future__ import annotations

from typing import Any

from cli_support import schedsearch
from records_support import record

from schedsearch.measurement import Anchor, Measurement, Outcome, Record
from schedsearch.records.store import Store


def of_race(time_ns: float, anchor_ns: float = 4000.0, **changes: Any) -> Record:
    """A record of a final race in which the default took `anchor_ns`."""
    measurement = Measurement(Outcome.OK, times_ns=(time_ns,), host="secret-host", device_uuid="GPU-1234")
    return record(measurement=measurement, anchor=Anchor("c0de", anchor_ns), final_race=True, **changes)


def raced(store: Store, time_ns: float, anchor_ns: float = 4000.0, **changes: Any) -> int:
    record_id = store.append(of_race(time_ns, anchor_ns, **changes))
    store.promote(record_id)
    return record_id


def ok(*arguments: Any) -> str:
    result = schedsearch(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout
