"""Files of records that people give one another: `records push` writes them, `records pull` reads them.

A file is JSON lines, packed: a header with a manifest, then one record a line, each from a final race with its default. It
is named by its content and appears complete, so that a folder needs no lock: two who push at once add two files.

    {"kind": "header", "format": 5, ..., "manifest": {"format": 1, "who": ..., "sha256": ..., "records": ..., ...}}
    {"kind": "record", ...}                                                                  see `rows.to_json`

The manifest's sha256 is of all lines after the first. What comes in is somebody else's measurement: it is served nowhere
before its kernel was built and verified here (`docs/records.md`).

See docs/decisions/258-records-are-shared-as-entries.md.
"""

from __future__ import annotations

import gzip
import hashlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

from schedsearch.errors import NoRecordError, SchedsearchError, SchemaVersionError, UsageError
from schedsearch.identity import canonical_json
from schedsearch.measurement import Record
from schedsearch.records import exchange, rows
from schedsearch.records.entries import (
    LEAST_GAIN,
    Chosen,
    Entry,
    Task,
    better,
    chosen,
    kernel_of,
    known_here,
    why_impossible,
)
from schedsearch.records.formats.content import Content
from schedsearch.records.formats.recording import Place, parse_json
from schedsearch.records.output import is_database, new_file
from schedsearch.records.store import Store
from schedsearch.text import counted, printable, quoted, shortened

SUFFIX = ".jsonl.gz"
FORMAT = 1
MAX_RECORDS, MAX_BODY_BYTES = 20_000, 32 << 20
"""Of a file, unpacked: it is held in memory, and may come from anybody."""
_WHO = 100  # characters of a name
_MAX_PROBLEMS = 100  # lines about single records


@dataclass(frozen=True)
class Pushed:
    """A file of `push`: its manifest and its entries."""

    path: Path
    manifest: dict[str, Any]
    entries: tuple[Entry, ...]

    @property
    def who(self) -> str:
        return shortened(str(self.manifest.get("who", "")), _WHO)


@dataclass(frozen=True)
class PullReport:
    """What `pull` did.

    Attributes:
        files: that were read.
        added: records that were not there.
        known: entries that are not better than what this machine measured, or than another file's.
        problems: files and records that were left out, a line each.
    """

    files: int
    added: int
    known: int
    problems: tuple[str, ...]


def checked_who(who: str) -> str:
    """The name of who measured. Raises UsageError if it cannot stand in a manifest."""
    if not who.strip() or len(who) > _WHO or printable(who) != who:
        raise UsageError(f"who is {quoted(who)}; give 1 to {_WHO} printable characters, e.g. a name or an address")
    return who.strip()


def push(
    store: Store, destination: str | Path, who: str, *, target: str | None = None
) -> tuple[Path, dict[str, Any], Chosen]:
    """Writes the entries of a store (`entries.chosen`) to a new file.

    Names of hosts and cards are left out. No file is replaced.

    Args:
        destination: a file to be made, whose name ends with .jsonl.gz; any other name is a folder, which is made if its
            parent is there. In a folder the file is named by its content.

    Returns:
        The file, its manifest, and what was chosen. A file of the same entries that is there already is left as it is.

    Raises:
        NoRecordError: there are none.
        UsageError: `who` is impossible, there is another file of that name, or the file cannot be written.
    """
    who = checked_who(who)
    found = chosen(store, target=target)
    if not found.entries:
        raise NoRecordError(
            f"{store.name} has no record of a final race with its default{f' on {target}' if target else ''}; nothing was "
            "written; make some: schedsearch tune"
        )
    records = [_without_places(each.record) for each in found.entries if each.record is not None]
    lines = sorted(canonical_json({"kind": "record", **_json(each)}, finite=True).encode() + b"\n" for each in records)
    body = b"".join(lines)
    manifest = manifest_of(records, who) | {"sha256": hashlib.sha256(body).hexdigest(), "bytes": len(body)}
    header = {"kind": "header", "format": exchange.FORMAT, "uuid": store.uuid, "manifest": manifest}
    path = _place(Path(destination), manifest["sha256"])
    if path.is_file():
        if _digest(path) != manifest["sha256"]:
            raise UsageError(f"{path} is another file, which stays; give a folder, or a new name that ends with {SUFFIX}")
        return path, manifest, found
    with new_file(path) as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed:
        stream = cast(BinaryIO, packed)
        stream.write(canonical_json(header, finite=True).encode() + b"\n")
        stream.write(body)
    return path, manifest, found


def _place(destination: Path, sha256: str) -> Path:
    """The file for these entries.

    Raises:
        UsageError: the folder cannot be made.
    """
    if destination.name.endswith(SUFFIX) and not destination.is_dir():
        return destination
    try:
        if not destination.exists():
            destination.mkdir(exist_ok=True)
    except OSError as error:
        why = f"cannot make the folder {destination}: {error.strerror}"
        raise UsageError(f"{why}; make its parent, or give another one") from None
    return destination / f"{sha256[:16]}{SUFFIX}" if destination.is_dir() else destination


def _digest(path: Path) -> str:
    """The sha256 in the manifest of a pushed file; "" of any other file."""
    try:
        return str(read_pushed(path).manifest["sha256"])
    except SchedsearchError:
        return ""


def manifest_of(records: Sequence[Record], who: str) -> dict[str, Any]:
    """What records are, without their digest."""
    from importlib.metadata import version

    toolchains = {canonical_json(each.toolchain): each.toolchain for each in records}
    return {
        "format": FORMAT,
        "who": who,
        "records": len(records),
        "targets": sorted({each.target for each in records}),
        "toolchains": [toolchains[text] for text in sorted(toolchains)],
        "policy": {
            "modes": sorted({each.measurement.mode for each in records}),
            "timed": sorted({str(each.measurement.policy(each.target.partition(":")[0])) for each in records}),
            "final_race": True,
            "least_gain": LEAST_GAIN,
        },
        "schedsearch": version("schedsearch"),
        "made_at": time.time(),
    }


def _without_places(record: Record) -> Record:
    measurement = replace(record.measurement, host="", device_uuid="", message="")
    return replace(record, measurement=measurement, run="", artifact=None, prediction=None, model=None)


def _json(record: Record) -> dict[str, Any]:
    return rows.to_json(rows.to_row(record))


def read_pushed(path: Path) -> Pushed:
    """Reads a file of `push`, all of it or nothing.

    Raises:
        UsageError: it cannot be read, is no such file, does not match its manifest, or holds what is no entry.
        SchemaVersionError: a newer schedsearch wrote it.
    """
    if is_database(path):
        raise UsageError(f"{path} is a database; add its records with: schedsearch records merge {path}")
    digest, count, nbytes, entries, manifest = hashlib.sha256(), 0, 0, list[Entry](), dict[str, Any]()
    with Content(path) as content:
        for number, line in enumerate(content.lines(), 1):
            place = Place(path).line(number)
            data = place.object(parse_json(line, place))
            kind = data.pop("kind", None)
            if number == 1:
                manifest = _checked_manifest(path, kind, data)
                continue
            digest.update(line.rstrip(b"\n") + b"\n")
            count, nbytes = count + 1, nbytes + len(line)
            if count > MAX_RECORDS or nbytes > MAX_BODY_BYTES:
                raise UsageError(
                    f"{path} holds more than {MAX_RECORDS:,} records or {MAX_BODY_BYTES >> 20} MiB; split the file"
                )
            if kind != "record":
                raise UsageError(f"{path}:{number}: {quoted(kind)} is not a record; `records push` writes nothing else")
            entries.append(_entry(path, number, data))
    if not manifest:
        raise UsageError(f"{path}: empty; give a file of: schedsearch records push")
    if (digest.hexdigest(), count) != (manifest.get("sha256"), manifest.get("records")):
        raise UsageError(
            f"{path} does not match its manifest: it was changed or cut ({count} records of {manifest.get('records')}); "
            "get the file again"
        )
    return Pushed(path, manifest, tuple(entries))


def _checked_manifest(path: Path, kind: object, header: dict[str, Any]) -> dict[str, Any]:
    manifest = header.get("manifest")
    if kind != "header" or not isinstance(manifest, dict):
        raise UsageError(
            f"{path} has no manifest; give a file of: schedsearch records push. For a file of records export: schedsearch "
            "records import"
        )
    versions = (("format", header, exchange.FORMAT), ("manifest", manifest, FORMAT))
    for name, found, known in ((name, part.get("format"), known) for name, part, known in versions):
        if not isinstance(found, int) or found < 1:
            raise UsageError(f"{path}: its {name} has the version {quoted(found)}; get the file again")
        if found > known:
            raise SchemaVersionError(
                f"{path}: its {name} has version {found}, this schedsearch knows up to {known}; upgrade schedsearch"
            )
    return manifest


def _entry(path: Path, number: int, data: dict[str, Any]) -> Entry:
    try:
        record = rows.from_json(data)
        if not record.measurement.ok or record.anchor is None:
            raise ValueError("it is not of a final race with its default")
        return Entry.of(record)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, SchedsearchError) as error:
        raise UsageError(f"{path}:{number}: {exchange.reason(error)}; get the file again") from error


def pull(
    store: Store, source: str | Path, *, target: str | None = None, versions: Mapping[str, int] | None = None
) -> PullReport:
    """Takes the entries of a file, or of all files of a folder, that are better than what the store has.

    Of several entries for a task the one with the largest gain over the default comes in, if it is better than the best that
    this machine measured. Configurations that this machine has raced, or that failed here, are passed over. An entry
    comes in as somebody else's measurement: `compile` builds and verifies it where nothing else is recorded, and `records
    verify --imported` races it with the default here. A file of a folder that cannot be used is left out, and the report
    says why.

    Args:
        target: only entries of this kind of device.
        versions: template -> its version here. Entries of other versions are left out, because nothing here can build them.
            None: they come in.

    Raises:
        UsageError, SchemaVersionError: `source` is a file that cannot be used, or a folder without any file.
    """
    path = Path(source)
    problems: list[str] = []
    found: dict[Task, tuple[Entry, str]] = {}
    files = total = 0
    known_kernels = known_here(store)
    for pushed in _read_all(path, problems) if path.is_dir() else [read_pushed(path)]:
        files, total = files + 1, total + len(pushed.entries)
        for entry in _usable(pushed, target, versions, problems):
            if entry.record is None or kernel_of(entry.record) in known_kernels:
                continue
            if entry.task not in found or better(entry, found[entry.task][0]):
                found[entry.task] = entry, f"{pushed.path.name} of {pushed.who}"
    own = {entry.task: entry for entry in (Entry.of(best.record) for best in store.bests() if not best.row.problem)}
    records = [
        replace(entry.record, source=origin)
        for entry, origin in found.values()
        if entry.record is not None and (entry.task not in own or _is_better(entry, own[entry.task]))
    ]
    report = exchange.add_records(store, records, source=str(path)) if records else exchange.Report()
    return PullReport(files, report.records_added, total - report.records_added, tuple(problems))


def _is_better(entry: Entry, own: Entry) -> bool:
    return not entry.same_kernel(own) and better(entry, own)


def _read_all(folder: Path, problems: list[str]) -> Iterator[Pushed]:
    paths = sorted(each for each in folder.iterdir() if each.name.endswith(SUFFIX) and each.is_file())
    if not paths:
        raise UsageError(f"{folder} has no file of records (*{SUFFIX}); make one: schedsearch records push {folder}")
    for path in paths:
        try:
            yield read_pushed(path)
        except SchedsearchError as error:
            problems.append(f"{shortened(str(error), 500)}: left out")


def _usable(pushed: Pushed, target: str | None, versions: Mapping[str, int] | None, problems: list[str]) -> Iterator[Entry]:
    others: Counter[tuple[str, int]] = Counter()
    for entry in pushed.entries:
        if target not in (None, entry.task[1]):
            continue
        if versions is not None and versions.get(entry.template) != entry.template_version:
            others[entry.template, entry.template_version] += 1
        elif why := why_impossible(entry):
            if len(problems) < _MAX_PROBLEMS:
                problems.append(f"{pushed.path}: {entry.label} {why}: left out")
        else:
            yield entry
    for (name, version), count in others.items():
        here = f"which has version {versions[name]}" if versions and name in versions else "which is not installed"
        of = f"version {version} of {shortened(name, _WHO)}"
        problems.append(f"{pushed.path}: {counted(count, 'record')} by {of}, {here} here: left out")
