"""A small database with something in every table, and files made of it: the seeds of the fuzzers."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sqlite3
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
from store_contract import A100, artifact, conv, profile, record

import schedsearch
from schedsearch.backend import compile_source, toolchain
from schedsearch.device.detect import detect
from schedsearch.measurement import Measurement, Outcome, Record
from schedsearch.records import exchange
from schedsearch.records.deployment import export_deploy
from schedsearch.records.formats.exchange import export_file
from schedsearch.records.store import Store
from schedsearch.template import load_template
from schedsearch.workload import Workload

DUMPS = Path(__file__).resolve().parents[1] / "data"

# Two tiny layers that differ in everything, so that the code of one gives wrong results, or worse, for the other.
SERVED = (
    schedsearch.Workload.conv2d(n=1, h=6, w=5, c=4, k=8, r=3, s=3, padding=1, dtype="float32", epilogue=("bias", "relu")),
    schedsearch.Workload.conv2d(n=2, h=4, w=4, c=8, k=4, r=1, s=1, dtype="float32"),
)
WORKLOAD_FILE = """\
target: cpu
defaults: {op: conv2d, dtype: float32}
tasks:
  - {name: first, shape: {n: 1, h: 6, w: 5, c: 4, k: 8, r: 3, s: 3}, padding: 1, epilogue: [bias, relu]}
  - {name: second, shape: {n: 2, h: 4, w: 4, c: 8, k: 4, r: 1, s: 1}}
"""


@dataclass(frozen=True)
class Samples:
    """Files by their content.

    Attributes:
        store, deployment: the database, and a deployment file made of it.
        older: databases of earlier schema versions.
        jsonl: exports as JSON lines, with and without code.
        kernel_tuner, t4, t1, autotvm: exports for other tuners.
        code_of: id of a workload in `SERVED` -> the sha256 of every artifact that was made for it.
    """

    store: bytes
    deployment: bytes
    older: tuple[bytes, ...]
    jsonl: tuple[bytes, ...]
    kernel_tuner: bytes
    t4: bytes
    t1: bytes
    autotvm: bytes
    code_of: dict[str, frozenset[str]]


@functools.cache
def make() -> Samples:
    """Compiles two kernels for each workload of `SERVED`, and adds records of every kind.

    The content is the same each time on the same machine, but for signatures.
    """
    numbers = itertools.count(1)
    with (
        tempfile.TemporaryDirectory() as name,
        mock.patch("uuid.uuid4", side_effect=lambda: uuid.UUID(int=next(numbers))),
        mock.patch("time.time", return_value=1.75e9),
    ):
        return _make(Path(name))


def _make(folder: Path) -> Samples:
    path = folder / "some.db"
    with Store.open(path) as store:
        code_of = {workload.id: frozenset(_add_kernels(store, workload)) for workload in SERVED}
        _add_others(store)
        export_deploy(store, folder / "deploy.db")
        exchange.export_jsonl(store, folder / "all.jsonl", artifacts=True)
        exchange.export_jsonl(store, folder / "plain.jsonl")
        for form, file in (("kernel-tuner", "kt.json"), ("t4", "t4_T4.json"), ("autotvm", "log.json")):
            export_file(store, folder / file, form, workload=conv().id, target=A100)

    def read(file: str) -> bytes:
        return (folder / file).read_bytes()

    return Samples(
        store=_as_one_file(path),
        deployment=read("deploy.db"),
        older=tuple(_from_dump(dump, folder) for dump in sorted(DUMPS.glob("schema_v*.sql"))),
        jsonl=(read("all.jsonl"), read("plain.jsonl")),
        kernel_tuner=read("kt.json"),
        t4=read("t4_T4.json"),
        t1=read("t4_T1.json"),
        autotvm=read("log.json"),
        code_of=code_of,
    )


@contextlib.contextmanager
def opened(samples: Samples) -> Iterator[Store]:
    """The sample database in a folder of its own."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "some.db"
        path.write_bytes(samples.store)
        with Store.open(path, readonly=True) as store:
            yield store


def make_one(path: Path, workload: Workload) -> None:
    """A database with two kernels of one workload, compiled now."""
    with Store.open(path) as store:
        list(_add_kernels(store, workload))


def _add_kernels(store: Store, workload: Workload) -> Iterator[str]:
    """Adds the default kernel and another one, as if they had been measured here. Yields the sha256 of their code."""
    target = detect("cpu")
    template = load_template("conv2d_cpu")
    space = template.space(workload, target)
    configs = [*space.sample(1, np.random.default_rng(0)), template.default(workload, target, space)]
    for number, config in enumerate(configs):
        built = compile_source(template.kernel(workload, target, config), target).artifact
        measurement = Measurement(
            Outcome.OK, times_ns=(1e6 - number, 1.1e6, 0.9e6), max_error=1e-7, host="node7", device_uuid=""
        )
        record_id = store.append(
            Record(
                workload=workload,
                target=target.key,
                template=template.name,
                template_version=template.version,
                config=config,
                measurement=measurement,
                toolchain=toolchain("cpu"),
                started_at=1.7e9 + number,
                finished_at=1.7e9 + number + 0.5,
            )
        )
        store.promote(record_id, built, if_faster=True)
        yield built.sha256


def _add_others(store: Store) -> None:
    ok = [store.append(record(1000.0 + number, number=number, target=A100)) for number in range(4)]
    for number, outcome in enumerate(Outcome, 10):
        if outcome is not Outcome.OK:
            store.append(record(number=number, outcome=outcome, target=A100))
    store.append(record(number=30, target=A100, final_race=True))
    store.add_profile(ok[0], profile())
    store.promote(ok[0], artifact())


def _as_one_file(path: Path) -> bytes:
    """The content of a database, without a log beside it."""
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    return path.read_bytes()


def _from_dump(dump: Path, folder: Path) -> bytes:
    path = folder / f"{dump.stem}.db"
    connection = sqlite3.connect(path)
    connection.executescript(dump.read_text())
    connection.close()
    return path.read_bytes()
