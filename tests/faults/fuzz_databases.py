"""Fuzzes databases: damaged ones are read as far as they go, refused with an error that names the file, and run nothing.

The seeds are a store with something in every table, a deployment file, and a database of every earlier schema version. Each
case damages a copy in one to three ways (`database_damages`), and gives it to one command or to deployment. What must hold:

- the command succeeds, or fails with its exit code and one short message;
- a command that only looks changes nothing;
- deployment loads no code but that which was made for the workload, and the kernel that it serves computes right values.
"""

from __future__ import annotations

import hashlib
import random
import shutil
from pathlib import Path
from typing import Any

from schedsearch.errors import DatabaseError
from schedsearch.records import trust
from schedsearch.records.lookup import Lookup
from schedsearch.records.store import Store

from . import database_damages, fuzzing, sample_database
from .commands import call, check_error
from .deployment import Deployment
from .fuzzing import Broken, Result

NAME = "databases"
FILE = "some.db"

# Commands that only look: the arguments, with {db}, {new} for a file to be written, and {yaml}.
LOOKING = (
    ("records", "list", "--db", "{db}"),
    ("records", "list", "--db", "{db}", "--json"),
    ("records", "list", "--db", "{db}", "--failed", "--limit", "3"),
    ("records", "list", "--db", "{db}", "--op", "conv2d", "--template", "conv2d_cpu", "--target", "cpu"),
    ("records", "show", "{id}", "--db", "{db}"),
    ("records", "show", "{id}", "--db", "{db}", "--json"),
    ("records", "best", "--db", "{db}"),
    ("records", "best", "--db", "{db}", "--json"),
    ("records", "export", "{new}", "--db", "{db}"),
    ("records", "export", "{new}", "--db", "{db}", "--artifacts"),
    ("records", "export", "{new}", "--db", "{db}", "--deploy"),
    ("records", "export", "{new}", "--db", "{db}", "--format", "kernel-tuner", "--template", "conv2d_wgmma"),
    ("records", "export", "{new}", "--db", "{db}", "--format", "t4", "--template", "conv2d_wgmma"),
    ("records", "export", "{new}", "--db", "{db}", "--format", "autotvm"),
    ("records", "merge", "{db}", "--db", "{other}"),
    ("explain", "{yaml}", "--db", "{db}", "--target", "cpu"),
    ("explain", "{yaml}", "--db", "{db}", "--target", "h200", "--json"),
    ("compile", "{yaml}", "--db", "{db}", "--target", "cpu", "--output", "{new}"),
    ("replay", "{db}", "--tuner", "random", "--seeds", "1", "--evaluations", "3"),
    ("tune", "{yaml}", "--db", "{db}", "--target", "cpu", "--dry-run"),
    ("records", "trust", "{db}"),
)
CHANGING = (
    ("records", "prune", "--db", "{db}"),
    ("records", "merge", "{good}", "--db", "{db}"),
    ("records", "import", "{jsonl}", "--db", "{db}"),
)
_IDS = ("1", "2", "5", "9", "12", "999", "0")


class Databases:
    """See `fuzzing.Fuzzer`."""

    def __init__(self, samples: sample_database.Samples | None = None) -> None:
        self._samples = samples or sample_database.make()
        self._seeds = (self._samples.store,) * 6 + (self._samples.deployment,) * 2 + self._samples.older
        self._deployment = Deployment(self._samples.code_of)

    def case(self, random: random.Random, folder: Path) -> str:
        path = folder / FILE
        path.write_bytes(random.choice(self._seeds))
        shutil.rmtree(trust.state_dir() / "trusted", ignore_errors=True)
        how = random.random()
        done = []
        if how < 0.05:  # a mark holds for what the file was when it was marked
            trust.trust(path)
            done.append("it was trusted")
        done += database_damages.damage(path, random)
        try:
            if how < 0.3:
                return self._deployment.check(path, random)
            if how < 0.4:
                return _look_up(path, random)
            return self._command(path, folder, random)
        except Broken as broken:
            raise Broken(f"{broken} (after {'; '.join(done)})") from None
        except Exception as error:
            error.add_note(f"after {'; '.join(done)}")
            raise

    def _command(self, path: Path, folder: Path, random: random.Random) -> str:
        changing = random.random() < 0.15
        template = random.choice(CHANGING if changing else LOOKING)
        files = {
            "good": self._samples.store,
            "yaml": sample_database.WORKLOAD_FILE.encode(),
            "jsonl": self._samples.jsonl[0],
        }
        for name, content in files.items():
            if any(f"{{{name}}}" in part for part in template):
                (folder / f"{name}.x").write_bytes(content)
        places: dict[str, Any] = {name: folder / f"{name}.x" for name in (*files, "new", "other")}
        arguments = [part.format(db=path, id=random.choice(_IDS), **places) for part in template]
        # SQLite itself removes or replays what lies beside a file.
        before = None if changing or len(list(folder.glob(f"{FILE}*"))) > 1 else _content(path)
        answer = call(*arguments, names=(FILE, "conv2d", "records", "--db"), codes=(0, 2, 4, 6))
        if before is not None and _content(path) != before:
            raise Broken(f"{' '.join(template)} changed the database")
        return f"{answer.word}"


def _look_up(path: Path, random: random.Random) -> str:
    """Reads as a program does that only deploys, and as one that uses the store."""
    workload = random.choice(sample_database.SERVED)
    try:
        if random.random() < 0.5:
            with Lookup(path) as lookup:
                lookup.exact(workload.id, random.choice(("x", "cpu")), "cold-graph-v1")
                lookup.nearest("conv2d", "cold-graph-v1")
                for row in lookup.same_architecture(workload.id, "cold-graph-v1"):
                    if row.artifact_sha256:
                        lookup.code(row)
                _ = lookup.created_here, lookup.uuid, lookup.kind, lookup.version()
            return "looked up"
        with Store.open(path, create=False, readonly=True) as store:
            store.history()
            list(store.bests())
            store.runs()
            store.stats()
            store.health()
            store.records_after(0)
            for one in sample_database.SERVED:
                store.measured(one, "cpu", "conv2d_cpu", 1)
                store.last_race(one, "cpu")
            store.tuned("conv2d", "conv2d_cpu", 1)
        return "read"
    except DatabaseError as error:
        check_error(error, (FILE,), "the store")
        return "refused"


def _content(path: Path) -> tuple[str, ...]:
    return hashlib.sha256(path.read_bytes()).hexdigest(), *sorted(each.name for each in path.parent.glob(f"{FILE}*"))


def run(seed: int, count: int, folder: Path, deadline_s: float | None = None, first: int = 0, **options: Any) -> Result:
    """See `fuzzing.run`."""
    return fuzzing.run(NAME, Databases(), seed, count, folder, deadline_s, first=first, **options)
