"""Fills the timeline of a run: when its candidates waited or were built, and when which device had them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from schedsearch.dashboard import loose
from schedsearch.dashboard.source import Source, TaskId, task_key
from schedsearch.dashboard.views.overview import RunRow, TaskRow
from schedsearch.dashboard.views.run import Bars, DeviceLane, RunView

COLUMNS = (
    "id", "outcome", "final_race", "started_at", "finished_at", "run_s", "device_uuid", "workload_id", "target_key", "mode",
)  # fmt: skip
RESOLUTION = 1500  # stretches that a lane is drawn with at most; nearer neighbours are joined


@dataclass(frozen=True)
class Stretch:
    """Something that lasted from `start_s` to `end_s`; see `views.run.Bars`."""

    start_s: float
    end_s: float
    task: int
    outcome: str
    race: bool
    trial: str
    count: int = 1

    def joined(self, other: Stretch) -> Stretch:
        return Stretch(
            start_s=min(self.start_s, other.start_s),
            end_s=max(self.end_s, other.end_s),
            task=self.task if self.task == other.task else -1,
            outcome=self.outcome if self.outcome == other.outcome else "",
            race=self.race and other.race,
            trial="",
            count=self.count + other.count,
        )


def run_view(source: Source, row: RunRow, tasks: dict[TaskId, TaskRow]) -> RunView:
    """The timeline of a run.

    Args:
        tasks: the tasks' rows of the overview.

    Raises:
        SchedsearchError: the database cannot be read now.
    """
    places = {part.task: index for index, part in enumerate(row.tasks)}
    rows = source.store.columns(COLUMNS, run=row.id) if source.store else ()
    busy, waiting = _stretches(source, row, places, rows)
    devices = _devices(source, row, busy)
    lanes = [*(busy.get(uuid, []) for uuid in devices), *lanes_of(waiting)]
    seconds = max([row.wall_s, *(stretch.end_s for lane in lanes for stretch in lane)])
    drawn = [joined(lane, seconds / RESOLUTION) for lane in lanes]
    names = {task.key: task.name for task in tasks.values()}
    keys = tuple(part.task for part in row.tasks)
    return RunView(
        row=row,
        tasks=tuple(names.get(key, "a task that is not listed") for key in keys),
        keys=keys,
        devices=tuple(devices.values()),
        lanes=len(lanes),
        seconds=seconds,
        joined=any(len(lane) < len(whole) for lane, whole in zip(drawn, lanes)),
        bars=_bars(drawn),
        notes=() if any(busy.values()) else ("no record of this run can be read, so there is no timeline",),
    )


def _stretches(
    source: Source, row: RunRow, places: dict[str, int], rows: Iterable[tuple[Any, ...]]
) -> tuple[dict[str, list[Stretch]], list[Stretch]]:
    """When each device, by its UUID, had each candidate, one after the other, and the times before."""
    devices: dict[str, list[Stretch]] = {}
    waiting: list[Stretch] = []
    races: dict[tuple[str, int], list[tuple[Stretch, float]]] = {}
    for number, outcome, race, started_at, finished_at, run_s, uuid, *task in rows:
        start_s, end_s = max(0.0, started_at - row.started_at_s), finished_at - row.started_at_s
        taken_s = max(start_s, end_s - run_s)
        place = places.get(task_key(source.key, (task[0], task[1], task[2])), -1)
        whole = Stretch(start_s, end_s, place, outcome, race, f"{source.key}.{number}")
        if race:
            races.setdefault((uuid, place), []).append((whole, run_s))
        elif run_s > 0:
            devices.setdefault(uuid, []).append(replace(whole, start_s=taken_s))
        if taken_s > start_s and not race:
            waiting.append(replace(whole, end_s=taken_s))
    for (uuid, _), entrants in races.items():
        devices.setdefault(uuid, []).append(_race(entrants))
    return {uuid: in_turns(found) for uuid, found in devices.items()}, waiting


def _devices(source: Source, row: RunRow, busy: Mapping[str, object]) -> dict[str, DeviceLane]:
    """The devices of a run by their UUIDs, as it names them, and then others that measured; at least one."""
    run = next((run for run in source.runs if run["id"] == row.id), {})
    said = [loose.mapping(each) for each in loose.sequence(loose.mapping(run.get("summary")).get("devices"))]
    known = [loose.mapping(each) for each in loose.sequence(loose.mapping(run.get("info")).get("devices"))]
    found: dict[str, DeviceLane] = {}
    for each in said or known:
        problem = loose.text(each.get("problem"))
        state = loose.text(each.get("state")) if row.state == "running" else ""
        lane = DeviceLane(
            loose.text(each.get("name")) or "device", state or ("quarantined" if problem else ""), problem,
            loose.whole(each.get("trials")),
        )  # fmt: skip
        found[loose.text(each.get("uuid"))] = lane
    unnamed = [uuid for uuid in busy if uuid not in found]
    if len(found) == 1 and unnamed:  # a run on one device, which records name in another way
        found = {uuid: next(iter(found.values())) for uuid in unnamed[:1]}
    for uuid in unnamed:
        found.setdefault(uuid, DeviceLane(f"device {uuid}" if len(busy) > 1 else "device"))
    return found or {"": DeviceLane("device")}


def _race(entrants: Sequence[tuple[Stretch, float]]) -> Stretch:
    """A final race as one stretch. Its entrants are timed in turns, and each of them counts its share of the seconds."""
    whole = reduce(Stretch.joined, (entrant for entrant, _ in entrants))
    return replace(whole, start_s=max(0.0, whole.end_s - sum(run_s for _, run_s in entrants)))


def in_turns(stretches: Iterable[Stretch]) -> list[Stretch]:
    """Stretches of the device, which has one candidate at a time: each begins when the one before has ended.

    Two that end at the same moment are joined, because nothing tells who had the device when.
    """
    found: list[Stretch] = []
    for stretch in sorted(stretches, key=lambda each: (each.end_s, each.start_s)):
        if found and found[-1].end_s >= stretch.end_s:
            found[-1] = replace(found[-1].joined(stretch), start_s=found[-1].start_s)
        else:
            found.append(replace(stretch, start_s=max(stretch.start_s, found[-1].end_s) if found else stretch.start_s))
    return found


def lanes_of(stretches: Sequence[Stretch]) -> list[list[Stretch]]:
    """Stretches in as few lanes as possible, so that none overlap in a lane: the first free lane takes the next one."""
    lanes: list[list[Stretch]] = []
    busy: list[tuple[float, int]] = []  # end of a lane's last stretch, lane
    free: list[int] = []
    for stretch in sorted(stretches, key=lambda each: (each.start_s, each.end_s)):
        while busy and busy[0][0] <= stretch.start_s:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            free.append(len(lanes))
            lanes.append([])
        lane = heapq.heappop(free)
        lanes[lane].append(stretch)
        heapq.heappush(busy, (stretch.end_s, lane))
    return lanes


def joined(lane: Sequence[Stretch], least_s: float) -> list[Stretch]:
    """A lane of which neighbours are joined that begin within the same `least_s` seconds. Long ones stay as they are.

    Args:
        lane: by ascending start.
    """
    found: list[Stretch] = []
    for stretch in lane:
        last = found[-1] if found else None
        if last is not None and stretch.end_s - last.start_s < least_s:
            found[-1] = last.joined(stretch)
        else:
            found.append(stretch)
    return found


def _bars(lanes: Sequence[Sequence[Stretch]]) -> Bars:
    placed = [(lane, stretch) for lane, stretches in enumerate(lanes) for stretch in stretches]
    return Bars(
        lane=[lane for lane, _ in placed],
        start_s=[round(each.start_s, 4) for _, each in placed],
        end_s=[round(each.end_s, 4) for _, each in placed],
        task=[each.task for _, each in placed],
        outcome=[each.outcome for _, each in placed],
        race=[each.race for _, each in placed],
        trial=[each.trial for _, each in placed],
        count=[each.count for _, each in placed],
    )
