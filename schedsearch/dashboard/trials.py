"""The records of one task column by column. It grows with the database, so that only new records are read and parsed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from schedsearch.dashboard import loose
from schedsearch.dashboard.effects import Searched
from schedsearch.dashboard.noise import spread_of
from schedsearch.dashboard.progress import TuningClock
from schedsearch.dashboard.views.task import Knobs
from schedsearch.dashboard.views.values import JSON
from schedsearch.measurement import Outcome

COLUMNS = (
    "id", "template", "config", "outcome", "time_ns", "times_ns", "final_race", "run", "batch", "model", "prediction",
    "started_at", "finished_at", "registers", "shared_bytes", "local_bytes", "spill_bytes", "code_bytes", "build_s",
    "run_s", "clocks", "message",
)  # fmt: skip
"""The columns of table record that `Trials.add` takes, in this order."""

OUTCOMES = tuple(map(str, Outcome))
_CODE = {outcome: index for index, outcome in enumerate(OUTCOMES)}


class _KnobTable:
    """The knobs of a template and their values, numbered in the order of their first occurrence."""

    def __init__(self) -> None:
        self.values: dict[str, dict[tuple[type, JSON], int]] = {}

    def codes(self, config: dict[str, JSON]) -> list[int]:
        """One number for each knob known so far, -1 for a knob that the config lacks."""
        if config.keys() - self.values.keys():
            for name in config:
                self.values.setdefault(name, {})
        return [
            found.setdefault((type(config[name]), config[name]), len(found)) if name in config else -1
            for name, found in self.values.items()
        ]

    def sorted(self, template: str) -> tuple[Knobs, list[list[int]]]:
        """The knobs with ascending values, and for each knob the place of each number among them; -1 stays -1."""
        names, values, places = [], [], []
        for name, found in self.values.items():
            order = sorted(found, key=_value_order)
            place = {typed: index for index, typed in enumerate(order)}
            names.append(name)
            values.append(tuple(value for _, value in order))
            places.append([*(place[typed] for typed in found), -1])
        return Knobs(template, tuple(names), tuple(values)), places


def _value_order(typed: tuple[type, JSON]) -> tuple[int, Any]:
    kind, value = typed
    return (1, value) if kind in (int, float) else (0, int(value)) if kind is bool else (2, str(value))


@dataclass
class Trials:
    """All lists have one entry for each record, in the order of appending.

    Attributes:
        template: index into `templates`; `outcome` into `OUTCOMES`; `run` into `runs`; `message` into `messages`, whose
            first one is "".
        throttle: what throttled the card, "" if nothing did.
        last_id, stamp: the last record that was read, and `Store.stamp` at that time.
        race_times_ns: id -> all repetitions, of the records of final races.
    """

    templates: list[str] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=lambda: [""])
    id: list[int] = field(default_factory=list)
    template: list[int] = field(default_factory=list)
    config_json: list[str] = field(default_factory=list)
    outcome: list[int] = field(default_factory=list)
    time_ns: list[float | None] = field(default_factory=list)
    spread: list[float | None] = field(default_factory=list)
    race: list[bool] = field(default_factory=list)
    run: list[int] = field(default_factory=list)
    batch: list[int] = field(default_factory=list)
    model: list[int | None] = field(default_factory=list)
    prediction: list[float | None] = field(default_factory=list)
    tuning_s: list[float] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    registers: list[int | None] = field(default_factory=list)
    shared_bytes: list[int | None] = field(default_factory=list)
    local_bytes: list[int | None] = field(default_factory=list)
    spill_bytes: list[int | None] = field(default_factory=list)
    code_bytes: list[int | None] = field(default_factory=list)
    build_s: list[float] = field(default_factory=list)
    run_s: list[float] = field(default_factory=list)
    sm_mhz: list[float | None] = field(default_factory=list)
    temperature_c: list[float | None] = field(default_factory=list)
    power_w: list[float | None] = field(default_factory=list)
    throttle: list[str] = field(default_factory=list)
    message: list[int] = field(default_factory=list)
    race_times_ns: dict[int, tuple[float, ...]] = field(default_factory=dict)
    last_id: int = 0
    stamp: tuple[Any, ...] = ()
    _tables: list[_KnobTable] = field(default_factory=list)
    _codes: list[list[int]] = field(default_factory=list)
    _clock: TuningClock = field(default_factory=TuningClock)
    _where: dict[tuple[str, str], int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.id)

    def add(self, rows: Iterable[tuple[Any, ...]], run_starts: dict[str, float]) -> None:
        """Appends records. One whose JSON is damaged is left out."""
        for row in rows:
            self.last_id = row[0]
            try:
                config, clocks = json.loads(row[2]), loose.mapping(json.loads(row[20]))
                times = tuple(map(float, json.loads(row[5]))) if row[5] is not None else ()
            except (ValueError, TypeError, RecursionError):
                continue
            if isinstance(config, dict) and all(isinstance(value, str | int) for value in config.values()):
                self._add(row, config, clocks, times, run_starts)

    def _add(
        self,
        row: tuple[Any, ...],
        config: dict[str, JSON],
        clocks: dict[str, JSON],
        times: tuple[float, ...],
        run_starts: dict[str, float],
    ) -> None:
        (
            number, template, config_json, outcome, time_ns, _, race, run, batch, model, prediction, started_at, finished_at,
            registers, shared, local, spill, code, build_s, run_s, _, message,
        ) = row  # fmt: skip
        self.id.append(number)
        self.template.append(self._index("template", self.templates, template))
        if len(self._tables) < len(self.templates):
            self._tables.append(_KnobTable())
        self._codes.append(self._tables[self.template[-1]].codes(config))
        self.config_json.append(config_json)
        self.outcome.append(_CODE[outcome])
        self.time_ns.append(time_ns)
        self.spread.append(spread_of(times))
        self.race.append(race)
        self.run.append(self._index("run", self.runs, run))
        self.batch.append(batch)
        self.model.append(model)
        self.prediction.append(prediction)
        self.tuning_s.append(round(self._clock.at(run, run_starts.get(run), started_at, finished_at), 3))
        self.at_s.append(round(finished_at, 3))
        built = bool(registers or code or shared)
        self.registers.append(registers if built else None)
        self.shared_bytes.append(shared if built else None)
        self.local_bytes.append(local if built else None)
        self.spill_bytes.append(spill if built else None)
        self.code_bytes.append(code if built else None)
        self.build_s.append(round(build_s, 3))
        self.run_s.append(round(run_s, 4))
        self.sm_mhz.append(loose.number(clocks.get("sm_mhz")))
        self.temperature_c.append(loose.number(clocks.get("temperature_c")))
        self.power_w.append(loose.number(clocks.get("power_w")))
        throttle = clocks.get("throttle")
        self.throttle.append("" if throttle in (None, "", "none", False, 0) else str(throttle))
        self.message.append(self._index("message", self.messages, message) if message else 0)
        if race:
            self.race_times_ns[number] = times

    def _index(self, kind: str, names: list[str], name: str) -> int:
        found = self._where.get((kind, name))
        if found is None:
            found = self._where[kind, name] = len(names)
            names.append(name)
        return found

    def knobs(self) -> tuple[tuple[Knobs, ...], list[list[int | None]]]:
        """The knobs of each template, and the config of each trial as indices of `Knobs.values`, None without it."""
        tables = [table.sorted(template) for table, template in zip(self._tables, self.templates)]
        configs: list[list[int | None]] = []
        for template, codes in zip(self.template, self._codes):
            places = tables[template][1]
            codes = codes + [-1] * (len(places) - len(codes))
            configs.append([None if code < 0 else place[code] for place, code in zip(places, codes)])
        return tuple(knobs for knobs, _ in tables), configs

    def searched(self, knobs: Sequence[Knobs], configs: Sequence[Sequence[int | None]]) -> list[Searched]:
        """The search of each template, without final races; `knobs` and `configs` are of `knobs()`."""
        found = []
        for index, of in enumerate(knobs):
            where = [i for i, (template, race) in enumerate(zip(self.template, self.race)) if template == index and not race]
            if where:
                codes = [[-1 if code is None else code for code in configs[i]] for i in where]
                times = [self.time_ns[i] for i in where]
                found.append(
                    Searched(
                        of,
                        np.array(codes, dtype=np.int32).reshape(len(where), len(of.names)),
                        np.array([math.nan if time_ns is None else time_ns for time_ns in times]),
                        np.array([OUTCOMES[self.outcome[i]] for i in where]),
                        np.array([self.id[i] for i in where], dtype=np.int64),
                        [self.messages[self.message[i]] for i in where],
                    )
                )
        return found

    def config(self, position: int) -> dict[str, JSON]:
        return loose.mapping(loose.parsed(self.config_json[position]))
