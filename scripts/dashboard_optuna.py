"""Load the trials of a database into a storage of Optuna, to see both dashboards side by side.

    python scripts/dashboard_optuna.py records.db optuna.db
    optuna-dashboard sqlite:///optuna.db

Each task becomes a study of its search, without final races; times are in milliseconds, failures become failed trials.
Needs `pip install optuna optuna-dashboard`.
"""

from __future__ import annotations

import argparse
import datetime
from collections import defaultdict
from pathlib import Path

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from schedsearch.measurement import Record
from schedsearch.records.store import Store


def trial_of(record: Record, knobs: dict[str, CategoricalDistribution]) -> FrozenTrial:
    time_ns = record.measurement.time_ns
    found = create_trial(
        params=dict(record.config),
        distributions={name: knobs[name] for name in record.config},
        value=None if time_ns is None else time_ns / 1e6,
        state=TrialState.FAIL if time_ns is None else TrialState.COMPLETE,
    )
    found.datetime_start = datetime.datetime.fromtimestamp(record.started_at)
    found.datetime_complete = datetime.datetime.fromtimestamp(record.finished_at)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("database", type=Path)
    parser.add_argument("storage", type=Path, help="a file that does not exist yet")
    options = parser.parse_args()
    tasks: dict[str, list[Record]] = defaultdict(list)
    with Store.open(options.database, readonly=True) as store:
        for record in store.history():
            if not record.final_race:
                tasks[f"{record.workload.label}, {record.target}, {record.measurement.mode}"].append(record)
    for name, records in tasks.items():
        values: dict[str, dict[str | int, None]] = defaultdict(dict)
        for record in records:
            for knob, value in record.config.items():
                values[knob][value] = None
        knobs = {knob: CategoricalDistribution(sorted(found, key=str)) for knob, found in values.items()}
        study = optuna.create_study(study_name=name, storage=f"sqlite:///{options.storage}", direction="minimize")
        study.add_trials([trial_of(record, knobs) for record in records])


if __name__ == "__main__":
    main()
