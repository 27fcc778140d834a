"""Fuzzes imports: files of every format are taken, or refused with an error that names the file, and give no code.

The seeds are our own exports in every format, small caches of other tuners, and the beginnings of public recorded spaces if
they are there. Some places of the JSON values change, or lines, or bytes; some files are gzip, some of those damaged or far
larger when unpacked. The file is imported into a new database or into one that already has kernels, or replayed.
"""

from __future__ import annotations

import gzip
import json
import random
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
        results = [json.loads(self._samples.t4), replay_support.t4(replay_support.cache())]
        self._descriptions = [
            json.loads(self._samples.t1),
            replay_support.t1("bx * unroll != 64", "order in ['row', 'column'] or min(bx, 64) <= 64"),
        ]
        for path in sorted(PUBLIC.glob("*.json*")) if PUBLIC.is_dir() else ():  # without it, our own files remain
            _add_public(path, caches, results, self._descriptions)
        self._values = {"kernel-tuner": caches, "t4": results}
        self._lines = {
            "jsonl": [text.decode().splitlines() for text in self._samples.jsonl],
            "autotvm": [self._samples.autotvm.decode().splitlines()],
        }
        self._others = [*self._samples.jsonl, self._samples.kernel_tuner, self._samples.t1, self._samples.autotvm]
        self._zeros = gzip.compress(bytes(4 << 20)), gzip.compress(b"[" + b" " * (4 << 20)), gzip.compress(b"\n" * (4 << 20))

    def case(self, random: random.Random, folder: Path) -> str:
        form = random.choice(FORMATS)
        path = folder / ("some_T4.json" if form == "t4" else "some.json")
        path.write_bytes(self._packed(self._content(form, random), random))
        if form == "t4":
            description = random.choice(self._descriptions)
            text = json_mutations.mutated(description, random) if random.random() < 0.5 else json.dumps(description)
            (folder / "some_T1.json").write_bytes(self._packed(text.encode("utf-8", "replace"), random))
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
            if ours and _records(db) != len(self._samples_ids(folder)):
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

    def _samples_ids(self, folder: Path) -> range:
        path = folder / "before.db"
        path.write_bytes(self._samples.store)
        return range(_records(path))

    def _content(self, form: str, random: random.Random) -> bytes:
        if form in self._values:
            data = json_mutations.mutated(random.choice(self._values[form]), random).encode("utf-8", "replace")
        else:
            data = _changed_lines(random.choice(self._lines[form]), random)
        while random.random() < 0.15:
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
    import contextlib
    import sqlite3

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


def _add_public(path: Path, caches: list[Any], results: list[Any], descriptions: list[Any]) -> None:
    """The beginning of a public recorded space, in its own format."""
    data = json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
    if "cache" in data:
        caches.append({**data, "cache": dict(list(data["cache"].items())[:_ENTRIES])})
    elif "results" in data:
        results.append({**data, "results": data["results"][:_ENTRIES]})
    elif "ConfigurationSpace" in data:
        descriptions.append(data)


def run(seed: int, count: int, folder: Path, deadline_s: float | None = None, first: int = 0, **options: Any) -> Result:
    """See `fuzzing.run`."""
    return fuzzing.run(NAME, Imports(), seed, count, folder, deadline_s, first=first, **options)
