"""Fuzzes imports: files of every format are taken, or refused with an error that names the file, and give no code.

The seeds are our own exports in every format, small caches of other tuners, and the beginnings of public recorded spaces if
they are there. Some places of the JSON values change, or lines, or bytes; some files are gzip, some of those damaged or far
larger when unpacked. The file is imported into a new database or into one that already has kernels, or replayed.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import random
import sqlite3
from pathlib import Path
from typing import Any

import replay_support

from . import fuzzing, json_mutations, sample_database, yaml_mutations
from .commands import call
from .deployment import Deployment
from .fuzzing import Broken, Result

NAME = "imports"
PUBLIC = Path(__file__).resolve().parents[3] / "shared" / "replay"
FORMATS = ("jsonl", "kernel-tuner", "t4", "autotvm")
_ENTRIES = 20  # kept of a public file


class Imports:
    """See `fuzzing.Fuzzer`."""

    def __init__(self, samples: sample_database.Samples | None = None) -> None:
        self._samples = samples or sample_database.make()
        self._deployment = Deployment(self._samples.code_of)
        cache = replay_support.cache({"bx": [16, 32], "unroll": [1, 2.5], "order": ["row", "column"], "flag": [True]})
        caches = [json.loads(self._samples.kernel_tuner), replay_support.cache(), cache]
        conditions = replay_support.t1("bx * unroll != 64", "order in ['row', 'column'] or min(bx, 64) <= 64")
        self._results = [
            (json.loads(self._samples.t4), json.loads(self._samples.t1)),
            (replay_support.t4(replay_support.cache()), conditions),
        ]
        for path in sorted(PUBLIC.glob("*_A100*.gz")) if PUBLIC.is_dir() else ():  # without it, our own files remain
            _add_public(path, caches, self._results)
        self._caches = caches
        self._lines = {
            "jsonl": [text.decode().splitlines() for text in self._samples.jsonl],
            "autotvm": [self._samples.autotvm.decode().splitlines()],
        }
        self._others = [*self._samples.jsonl, self._samples.kernel_tuner, self._samples.t1, self._samples.autotvm]
        with contextlib.closing(sqlite3.connect(":memory:")) as connection:
            connection.deserialize(self._samples.store.replace(b"\2\2", b"\1\1", 1))  # as a database without a log
            self._count = connection.execute("SELECT count(*) FROM record").fetchone()[0]
        self._zeros = gzip.compress(bytes(4 << 20)), gzip.compress(b"[" + b" " * (4 << 20)), gzip.compress(b"\n" * (4 << 20))

    def case(self, random: random.Random, folder: Path) -> str:
        form = random.choice(FORMATS)
        path = folder / ("some_T4.json" if form == "t4" else "some.json")
        if form == "t4":
            results, description = random.choice(self._results)
            first = random.random() < 0.5  # one of the two files changes
            path.write_bytes(self._packed(self._changed(results, random) if first else _plain(results), random))
            beside = _plain(description) if first else self._changed(description, random)
            (folder / "some_T1.json").write_bytes(self._packed(beside, random))
        elif form == "kernel-tuner":
            path.write_bytes(self._packed(self._changed(random.choice(self._caches), random), random))
        else:
            lines = _changed_lines(random.choice(self._lines[form]), random)
            path.write_bytes(self._packed(self._bent(lines, random), random))
        if form in ("kernel-tuner", "t4") and random.random() < 0.2:
            answer = call(
                *("replay", path, "--tuner", random.choice(("random", "grid")), "--seeds", "1", "--evaluations", "2,3"),
                names=("some_T4.json", "some_T1.json", "some.json"),
            )
            return f"{form} replay {answer.word}"
        return f"{form} {self._imported(form, path, folder, random)}"

    def _imported(self, form: str, path: Path, folder: Path, random: random.Random) -> str:
        db = folder / "into.db"
        ours = random.random() < 0.5
        if ours:
            db.write_bytes(self._samples.store)
        options = random.choice(((), (), ("--format", random.choice(FORMATS)), ("--json",)))
        names = ("some_T4.json", "some_T1.json", "some.json")
        answer = call("records", "import", path, "--db", db, *options, names=names)
        if answer.code:
            if not ours and db.exists():
                raise Broken("a new database is left behind after an import that failed")
            if ours and _records(db) != self._count:
                raise Broken("an import that failed added something")
            return "refused"
        if random.random() < 0.3:
            before = _records(db)
            call("records", "import", path, "--db", db, *options, names=names)
            if _records(db) != before:
                raise Broken(f"importing twice gives {_records(db)} records, once gives {before}")
        if random.random() < 0.3:
            call("records", "list", "--db", db, random.choice(("--json", "--failed")), codes=(0,))
            call("records", "best", "--db", db, codes=(0,))
            call("records", "export", folder / "again.jsonl", "--db", db, codes=(0,))
        if form == "jsonl":
            return f"taken, {self._deployment.check(db, random)}"
        return "taken"

    def _changed(self, value: Any, random: random.Random) -> bytes:
        return self._bent(json_mutations.mutated(value, random).encode("utf-8", "replace"), random)

    def _bent(self, data: bytes, random: random.Random) -> bytes:
        while random.random() < 0.1:
            data = yaml_mutations.mutate_bytes(data, self._others, random)
        return data

    def _packed(self, data: bytes, random: random.Random) -> bytes:
        how = random.random()
        if how > 0.12:
            return data
        packed = bytearray(gzip.compress(data, mtime=0))
        if how < 0.002:
            return bytes(packed) + random.choice(self._zeros) * random.choice((1, 30, 600))
        if how < 0.03:
            return bytes(packed[: random.randrange(len(packed))])
        if how < 0.05:
            packed[random.randrange(len(packed))] ^= 1 << random.randrange(8)
        elif how < 0.06:
            return gzip.compress(bytes(packed))
        elif how < 0.07:
            packed += b"trailing garbage"
        return bytes(packed)


def _records(db: Path) -> int:
    with contextlib.closing(sqlite3.connect(db)) as connection:
        return int(connection.execute("SELECT count(*) FROM record").fetchone()[0])


def _changed_lines(lines: list[str], rng: random.Random) -> bytes:
    """A file of lines in which some lines change, go or come again."""
    changed = list(lines)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(changed))
        how = rng.random()
        if how < 0.7:
            changed[at] = json_mutations.mutated(json.loads(lines[at % len(lines)]), rng)
        elif how < 0.8:
            del changed[at]
        elif how < 0.9:
            changed.insert(rng.randrange(len(changed) + 1), changed[at])
        else:
            other = rng.randrange(len(changed))
            changed[at], changed[other] = changed[other], changed[at]
        if not changed:
            break
    return "\n".join(changed).encode("utf-8", "replace") + b"\n"


def _plain(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "replace")


def _add_public(path: Path, caches: list[Any], results: list[tuple[Any, Any]]) -> None:
    """The beginning of a public recorded space: a cache, or T4 results with their description."""
    data = json.loads(gzip.decompress(path.read_bytes()))
    if "cache" in data:
        caches.append({**data, "cache": dict(list(data["cache"].items())[:_ENTRIES])})
    else:
        description = json.loads(path.with_name(f"{path.name.partition('_')[0]}_T1.json").read_text())
        results.append(({**data, "results": data["results"][:_ENTRIES]}, description))


def run(seed: int, count: int, folder: Path, deadline_s: float | None = None, first: int = 0, **options: Any) -> Result:
    """See `fuzzing.run`."""
    return fuzzing.run(NAME, Imports(), seed, count, folder, deadline_s, first=first, **options)
