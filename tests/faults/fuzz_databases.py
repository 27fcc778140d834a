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

import numpy as np
from conv2d_numpy import numpy_conv2d

import schedsearch
from schedsearch import backend
from schedsearch.backend import CompileError
from schedsearch.device.cpu import CpuDevice
from schedsearch.errors import DatabaseError, NoRecordError, SchedsearchError
from schedsearch.launch import Artifact
from schedsearch.records import trust
from schedsearch.records.lookup import Lookup
from schedsearch.records.store import Store
from schedsearch.workload import Workload

from . import database_damages, fuzzing, sample_database
from .commands import call, check_error
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
        self._calls = [_operands(workload) for workload in sample_database.SERVED]
        self._loaded: list[str] = []
        _record_loads(self._loaded)
        backend.compile_source = _no_compiler  # what is served here is stored code

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
                return self._deploy(path, random)
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

    def _deploy(self, path: Path, random: random.Random) -> str:
        """Asks for both kernels. A kernel that is served has the right code and computes right values."""
        words = []
        for workload, (arguments, wanted) in zip(sample_database.SERVED, self._calls):
            self._loaded.clear()
            try:
                allow = random.choice((("exact",), ("exact", "same_architecture")))
                with schedsearch.compile(workload, path, target="cpu", allow=allow) as kernel:
                    got = kernel(**arguments)
                    if not kernel.verified:
                        raise Broken(f"a kernel of rung {kernel.rung} that was never verified is served")
            except NoRecordError as error:
                check_error(error, (), "compile")
                words.append("no record")
            except SchedsearchError as error:
                check_error(error, (FILE,), "compile")
                words.append("refused")
            else:
                np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)
                words.append("served")
            if foreign := set(self._loaded) - self._samples.code_of[workload.id]:
                raise Broken(f"code that was not made for the workload was loaded: {foreign}")
        return f"deployment {' and '.join(sorted(set(words)))}"


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
                        lookup.code(row.artifact_sha256)
                _ = lookup.trusted, lookup.uuid, lookup.kind, lookup.version()
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


def _record_loads(loaded: list[str]) -> None:
    """Makes the CPU's device note the code that it is given, before it runs any of it."""
    load = CpuDevice.load

    def noting(self: CpuDevice, artifact: Artifact) -> Any:
        loaded.append(artifact.sha256)
        return load(self, artifact)

    CpuDevice.load = noting  # type: ignore[method-assign]


def _no_compiler(source: Any, target: Any) -> Any:
    raise CompileError("this campaign builds no kernels")


def _content(path: Path) -> tuple[str, ...]:
    return hashlib.sha256(path.read_bytes()).hexdigest(), *sorted(each.name for each in path.parent.glob(f"{FILE}*"))


def _operands(workload: Workload) -> tuple[dict[str, Any], Any]:
    rng = np.random.default_rng(7)
    arguments = {spec.name: rng.standard_normal(spec.shape).astype(np.float32) for spec in workload.signature}
    return arguments, numpy_conv2d(workload, arguments, {})


def run(seed: int, count: int, folder: Path, deadline_s: float | None = None, first: int = 0, **options: Any) -> Result:
    """See `fuzzing.run`."""
    return fuzzing.run(NAME, Databases(), seed, count, folder, deadline_s, first=first, **options)
