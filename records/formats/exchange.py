"""Records in the formats of other tuners, and files of other tuners as records.

A file that schedsearch wrote also holds its own records, which the other tuner ignores. They come back as they were, with
every repetition, message and stamp. A file that another tuner wrote becomes records of the operator `foreign`:

    workload   foreign(tuner, kernel, problem)        template, version   the kernel's name, 1
    target     "foreign:" and the device's name       mode                the tuner's name: its way of timing

If a file does not name its device, the file's name is used, so that records of two devices never become one task. Foreign
records are listed, exported and replayed like any other. They are never deployed.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from schedsearch.errors import UsageError
from schedsearch.measurement import Measurement, Outcome, Record
from schedsearch.records import exchange, rows
from schedsearch.records.formats import FORMATS, autotvm, kernel_tuner, t4
from schedsearch.records.formats.content import MAX_LINE_BYTES, Content
from schedsearch.records.formats.recording import Entry, Place, Recording, parse_json
from schedsearch.records.output import is_database, new_file
from schedsearch.records.store import Store
from schedsearch.space import Knob
from schedsearch.workload import Workload

_FOREIGN = "foreign"


@dataclass(frozen=True)
class Search:
    """What all records of one recorded space share, so that their times compare."""

    workload: Workload
    template: str
    template_version: int
    target: str
    mode: str

    def __str__(self) -> str:
        return f"{self.workload.label}, {self.template}, {self.target}, {self.mode}"


def recordings(
    store: Store, *, workload: str | None = None, template: str | None = None, target: str | None = None
) -> Iterator[tuple[Search, Recording]]:
    """Every search of a store as a recording, for the newest version of its template, in order of the first measurement.

    A configuration that was measured several times occurs once, with all its records in `Entry.extra`. The last record
    decides whether it failed; its time is that of the last measurement outside a final race.

    Args:
        store: the source.
        workload: use only workloads with this label or with an id that begins like this.
        template, target: use only this one.
    """
    found: dict[tuple[Search, tuple[str, ...]], list[Record]] = {}
    for record in store.history(template=template, target=target):
        w = record.workload
        if workload is None or w.label == workload or w.id.startswith(workload):
            search = Search(w, record.template, record.template_version, record.target, record.measurement.mode)
            # Files of other tuners have no template version that would show a change of knobs.
            names = tuple(record.config) if w.op == _FOREIGN else ()
            found.setdefault((search, names), []).append(record)
    newest: dict[Search, int] = {}
    for search, _ in found:
        key = dataclasses.replace(search, template_version=0)
        newest[key] = max(newest.get(key, 0), search.template_version)
    for (search, _), records in found.items():
        if search.template_version == newest[dataclasses.replace(search, template_version=0)]:
            yield search, _recording(search, records)


def _recording(search: Search, records: Sequence[Record]) -> Recording:
    names = list(records[-1].config)
    by_config: dict[Any, list[Record]] = {}
    for record in records:
        if list(record.config) == names:  # a third party's template may change its knobs and keep its version
            by_config.setdefault(record.config, []).append(record)
    values: dict[str, dict[Any, Any]] = {name: {} for name in names}
    for config in by_config:
        for name in names:
            values[name].setdefault((type(config[name]), config[name]), config[name])
    params = search.workload.params
    foreign = search.workload.op == _FOREIGN
    return Recording(
        tuner=params["tuner"] if foreign else "schedsearch",
        kernel=params["kernel"] if foreign else search.template,
        problem=params["problem"] if foreign else search.workload.json,
        device=search.target.removeprefix(f"{_FOREIGN}:") if foreign else search.target,
        knobs=tuple(Knob(name, tuple(seen.values())) for name, seen in values.items()),
        entries=tuple(_entry(measured, foreign) for measured in by_config.values()),
    )


def _entry(records: Sequence[Record], foreign: bool) -> Entry:
    chosen = records[-1]
    if chosen.measurement.ok:
        outside = [record for record in records if record.measurement.ok and not record.final_race]
        chosen = outside[-1] if outside else chosen
    measurement = chosen.measurement
    return Entry(
        config=chosen.config,
        outcome=measurement.outcome,
        # Other tuners use the mean of the repetitions, so their times are exported and replayed unchanged.
        time_ns=fmean(measurement.times_ns) if foreign and measurement.ok else measurement.time_ns,
        times_ns=measurement.times_ns,
        message=measurement.message,
        build_s=measurement.build_s,
        run_s=measurement.run_s,
        finished_at=chosen.finished_at,
        extra=tuple(rows.to_json(rows.to_row(record)) for record in records),
    )


# ---- out


def export_file(
    store: Store,
    path: str | Path,
    form: str,
    *,
    workload: str | None = None,
    template: str | None = None,
    target: str | None = None,
    made: Mapping[str, object] | None = None,
) -> dict[str, int | str]:
    """Writes records in the format of another tuner and replaces the file. It is a gzip if the name ends with .gz.

    A Kernel Tuner cache and T4 results hold one task. The T1 description goes beside the T4 file, as `<name>_T1.json`.

    Args:
        store: the source.
        path: the file.
        form: "kernel-tuner", "t4" or "autotvm".
        workload, template, target: use only this one, as for `recordings`.
        made: how the data was recorded, as JSON values for the file's readers. A cache holds them as `schedsearch`, T4
            results as `metadata.schedsearch`; an AutoTVM log has no place for them.

    Returns:
        {"configurations", "records"}, with t4 also {"description": its path}.

    Raises:
        UsageError: nothing matches; several tasks match and the format holds one; the file cannot be written; or with t4,
            a description with conditions would be lost.
    """
    found = list(recordings(store, workload=workload, template=template, target=target))
    if not found:
        raise UsageError(f"{store.name} has no record that matches; look with: schedsearch records list")
    if form != "autotvm" and len(found) > 1:
        listed = "; ".join(f"{search} (--workload {search.workload.id[:12]})" for search, _ in found[:10])
        raise UsageError(
            f"a file of the format {form} holds one task, and {len(found)} match: {listed}"
            f"{'; ...' if len(found) > 10 else ''}; choose with --workload, --template and --target"
        )
    counts: dict[str, int | str] = {
        "configurations": sum(len(recording.entries) for _, recording in found),
        "records": sum(len(entry.extra) for _, recording in found for entry in recording.entries),
    }
    chosen = [recording for _, recording in found]
    about = {} if made is None else {"schedsearch": dict(made)}
    if form == "kernel-tuner":
        _write(path, json.dumps({**about, **kernel_tuner.to_json(chosen[0])}, allow_nan=False))
    elif form == "t4":
        results, description = t4.to_json(chosen[0])
        results["metadata"] |= about
        beside = description_path(path)
        _require_room(Path(path), beside)
        _write(beside, json.dumps(description, allow_nan=False, indent=1))
        _write(path, json.dumps(results, allow_nan=False))
        counts["description"] = str(beside)
    else:
        _write(path, "".join(f"{line}\n" for recording in chosen for line in autotvm.to_lines(recording)))
    return counts


def description_path(path: str | Path) -> Path:
    """The path of a T4 file's T1 description, where `t4.description_of` finds it."""
    return Path(path).with_name(f"{_stem(path).removesuffix('_T4')}_T1.json")


def _require_room(path: Path, beside: Path) -> None:
    """Raises UsageError if the description of T4 results cannot be written beside them."""
    if path.exists() and not path.is_file():
        raise UsageError(
            f"T4 results are two files, the second beside the first, and {path} is a device or pipe; give a file"
        )
    try:
        conditions = t4.Description(beside).conditions
    except UsageError:  # there is no description, or an empty one
        return
    if conditions:
        raise UsageError(
            f"{beside} is a description with conditions, and that of an export has none; it is left alone: give another name"
        )


def _stem(path: str | Path) -> str:
    return Path(path).name.removesuffix(".gz").removesuffix(".json")


def _write(path: str | Path, text: str) -> None:
    path = Path(path)
    data = text.encode()
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    with new_file(path) as file:
        file.write(data)


# ---- in


def import_file(
    store: Store, path: str | Path, form: str | None = None, *, t1: str | Path | None = None, trusted: bool = False
) -> exchange.Report:
    """Adds the records of a file: all of them, or none if anything in it is wrong. A second import adds nothing.

    Args:
        store: receives the records.
        path: the file, gzip or not.
        form: one of FORMATS; by default it is recognised from the content.
        t1: the description of T4 results; by default the one beside them.
        trusted: for jsonl, see `exchange.import_jsonl`.

    Raises:
        UsageError: the file cannot be read, or something in it is wrong (it names file and place), or `t1` is given for a
            format that needs no description.
    """
    if is_database(path):
        raise UsageError(f"{path} is a database; add its records with: schedsearch records merge {path}")
    with Content(path) as content:  # which reads it once, as it may be a pipe
        value = None
        if form is None:
            form, value = recognise(content)
        if t1 is not None and form != "t4":
            raise UsageError(
                f"{path}: {form} needs no T1 description, which says what T4 results leave open; leave out --t1"
            )
        if form == "jsonl":
            return exchange.import_lines(store, content.lines(), source=str(path), trusted=trusted)
        if form == "autotvm":
            found = autotvm.parse(content.lines(), path)
        else:
            value = parse_json(content.document(), Place(path)) if value is None else value
            found = [kernel_tuner.parse(value, path) if form == "kernel-tuner" else t4.parse(value, path, t1)]
    made = (record for recording in found for entry in recording.entries for record in _records(recording, entry))
    report = exchange.add_records(store, made, source=str(path))
    return dataclasses.replace(report, warnings=tuple(text for recording in found for text in recording.warnings))


def recognise(content: Content) -> tuple[str, Any]:
    """Recognises the format of a file.

    Returns:
        The format, and the JSON value of a file that is one value; None for formats of lines.

    Raises:
        UsageError: the format is unknown, or the file cannot be read.
    """
    line = _value_of(content.first_line())
    if isinstance(line, dict) and "kind" in line:
        return "jsonl", None
    if isinstance(line, dict) and "input" in line and "result" in line:
        return "autotvm", None
    path = content.path
    data = parse_json(content.document(), Place(path))
    if kernel_tuner.is_cache(data):
        return "kernel-tuner", data
    if t4.is_results(data):
        return "t4", data
    t4.refuse_description(data, path)
    raise UsageError(f"{path}: the format is not recognised; give it with --format, one of {', '.join(FORMATS)}")


def _value_of(line: bytes) -> Any:
    """The JSON value of a line that can be one of a format of lines; None for any other line."""
    if len(line) > MAX_LINE_BYTES or (b'"kind"' not in line and b'"input"' not in line):
        return None
    try:
        return parse_json(line, Place(""))
    except UsageError:
        return None  # one value over many lines


def _records(recording: Recording, entry: Entry) -> Iterator[Record]:
    if entry.extra:
        for embedded in entry.extra:
            yield _embedded(recording, entry, embedded)
        return
    times_ns = entry.times_ns or ((entry.time_ns,) if entry.time_ns is not None else ())
    yield Record(
        workload=Workload(_FOREIGN, {"tuner": recording.tuner, "kernel": recording.kernel, "problem": recording.problem}),
        target=f"{_FOREIGN}:{recording.device or _stem(recording.source)}",
        template=recording.kernel or "unknown",
        template_version=1,
        config=entry.config,
        measurement=Measurement(
            outcome=entry.outcome,
            mode=recording.tuner,
            times_ns=times_ns if entry.outcome is Outcome.OK else (),
            message=entry.message,
            build_s=entry.build_s,
            run_s=entry.run_s,
        ),
        toolchain=dict(recording.toolchain),
        started_at=entry.finished_at,
        finished_at=entry.finished_at,
    )


def _embedded(recording: Recording, entry: Entry, data: Mapping[str, object]) -> Record:
    what = f"the record that schedsearch put beside the configuration {entry.config.json}"
    try:
        record = rows.from_json(data)
        rows.to_row(record)  # raises if the database cannot hold a value
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        Place(recording.source).fail(f"{what} is wrong: {exchange.reason(error)}; remove it")
    if record.config != entry.config:
        Place(recording.source).fail(f"{what} is of another one, {record.config.json}; remove it")
    return record
