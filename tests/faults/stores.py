"""What is stored: databases replaced under an open KernelCache, changed programs in trusted files, and keys of others."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import network_support
import numpy as np

import schedsearch
from schedsearch.errors import DatabaseError, SchedsearchError
from schedsearch.executable.stored import save
from schedsearch.launch import Artifact
from schedsearch.records import claims

from . import json_mutations, lab, sample_database, told
from .deployment import operands
from .scenario import Batch, Scenario

_DESCRIPTORS = 8  # that an open cache may have more than at its first call, whatever was replaced

# ---- databases that are replaced


def _descriptors() -> int:
    """How many this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _swap(path: Path, content: bytes) -> None:
    """Another file takes the place of a database."""
    new = path.with_name("new")
    new.write_bytes(content)
    new.replace(path)


def _damaged(content: bytes, rng: random.Random) -> bytes:
    return rng.choice((b"", b"text", content[: len(content) // 2], b"\0" * len(content), content[:4096]))


class _Calls:
    """A thread that calls one kernel all the time."""

    def __init__(self, kernel: Any, arguments: dict[str, Any], wanted: Any) -> None:
        self._kernel, self._arguments, self._wanted = kernel, arguments, wanted
        self._stop, self._thread = threading.Event(), threading.Thread(target=self._run)
        self.count = self.wrong = 0
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.count += 1
            self.wrong += not _right(self._kernel, self._arguments, self._wanted)

    def end(self) -> None:
        self._stop.set()
        self._thread.join()


def _right(kernel: Any, arguments: dict[str, Any], wanted: Any) -> bool:
    return bool(np.allclose(kernel(**arguments), wanted, rtol=1e-4, atol=1e-4))


def _replaced(batch: Batch) -> None:
    """The sound file comes back by rename after each damage, while a thread calls a kernel of the cache."""
    samples, path = sample_database.make(), Path("records.db")
    workload = sample_database.SERVED[0]
    arguments, wanted = operands(workload)
    for seed in batch.each():
        rng = batch.random(seed)
        _swap(path, samples.store)
        with schedsearch.KernelCache(path, "cpu", allow=("exact",)) as kernels:
            calls = _Calls(kernels.kernel(workload), arguments, wanted)
            before = _descriptors()
            try:
                for _ in range(rng.randrange(5, 20)):
                    _one_replacement(path, samples, rng)
                    with contextlib.suppress(SchedsearchError):  # it may serve what it has, or say what is wrong
                        kernels.kernel(workload)
                    _swap(path, rng.choice((samples.store, samples.deployment)))
                    kernel = kernels.kernel(workload)
                    served = kernel.level == "exact" and _right(kernel, arguments, wanted)
                    batch.check(
                        seed, served, f"after the file was restored, {kernel.level} serves, or computes wrong values"
                    )
            finally:
                calls.end()
            more = _descriptors() - before
            batch.check(seed, more <= _DESCRIPTORS, f"{more} descriptors more than before the replacements")
            batch.check(seed, not calls.wrong, f"{calls.wrong} of {calls.count} calls were wrong during replacements")


def _one_replacement(path: Path, samples: sample_database.Samples, rng: random.Random) -> None:
    how = rng.randrange(4)
    if how == 0:
        path.unlink()
    elif how == 1:
        _swap(path, _damaged(samples.store, rng))
    elif how == 2:
        _swap(path, rng.choice((samples.deployment, *samples.older)))
    else:
        path.write_bytes(_damaged(samples.store, rng))


# ---- keys and state folders of others


def _chmod(*modes: int) -> Callable[[Path, random.Random], None]:
    return lambda path, rng: path.chmod(rng.choice(modes))


def _to_another_user(path: Path, rng: random.Random) -> None:
    os.chown(path, 12345, 12345)


def _behind_a_link(path: Path, rng: random.Random) -> None:
    """A link to what others may write."""
    elsewhere = path.with_name(f"elsewhere of {path.name}")
    path.rename(elsewhere)
    elsewhere.chmod(0o777 if elsewhere.is_dir() else 0o666)
    path.symlink_to(elsewhere)


def _another_content(path: Path, rng: random.Random) -> None:
    path.write_bytes(rng.choice((b"", b"k", b"k" * 31, b"k" * 4096)))


def _a_folder(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


_WRONG_FOLDERS = (_chmod(0o777, 0o1777, 0o770, 0o722), _behind_a_link)
_WRONG_KEYS = (_chmod(0o666, 0o660, 0o644, 0o604), _behind_a_link, _another_content, _a_folder)


def _state_of_others(batch: Batch) -> None:
    samples, workload = sample_database.make(), sample_database.SERVED[0]
    Path("records.db").write_bytes(samples.store)
    own = Path(os.environ["SCHEDSEARCH_STATE_DIR"])
    signed = claims.sign(claims.Kind.EXECUTABLE, "ab" * 32)
    rooted = (_to_another_user,) if os.geteuid() == 0 else ()
    for seed in batch.each():
        rng = batch.random(seed)
        state = batch.folder / f"state {seed}"
        shutil.copytree(own, state)
        keys = [path for path in state.iterdir() if "key" in path.name]
        of_folder = rng.random() < 0.5 or not keys
        change = rng.choice((*_WRONG_FOLDERS, *rooted) if of_folder else (*_WRONG_KEYS, *rooted))
        change(state if of_folder else rng.choice(keys), rng)

        def look(state: Path = state) -> None:
            os.environ["SCHEDSEARCH_STATE_DIR"] = str(state)
            print(json.dumps(list(_vouches(workload, signed))))

        ended = lab.start(look, batch.folder, "look").wait(60.0)
        what = f"{'folder' if of_folder else 'key'}, {change.__name__}"
        if ended.status != 0:
            batch.failed(seed, f"{what}: exit {ended.status}: {ended.err[-800:]}")
        else:
            for text in json.loads(ended.out.splitlines()[-1]):
                batch.failed(seed, f"{what}: {text}")


def _vouches(workload: schedsearch.Workload, signed: str) -> Iterator[str]:
    """What a state that others can use must not do: vouch for code, sign it, or have stored code loaded."""
    from schedsearch.device.cpu import CpuDevice

    def refuse(device: CpuDevice, artifact: Artifact) -> Any:
        raise AssertionError("code was loaded")

    with contextlib.suppress(DatabaseError):  # it may say what is wrong with the key
        if claims.is_ours(claims.Kind.EXECUTABLE, "ab" * 32, signed):
            yield "it vouches for what was signed"
    with contextlib.suppress(DatabaseError):
        if claims.sign(claims.Kind.EXECUTABLE, "cd" * 32):
            yield "it signs"
    CpuDevice.load = refuse  # type: ignore[method-assign]
    serving = None
    with contextlib.suppress(DatabaseError):
        serving = schedsearch.explain(workload, "records.db", target="cpu", allow=("exact", "same_architecture")).serving
    if serving is not None and "stored machine code" in serving.reason:
        yield f"it has stored code loaded: {serving.reason}"


# ---- programs that are changed in trusted files


def _changed(program: str, rng: random.Random) -> str:
    """The program with other numbers in its calls, or any other change of its JSON."""
    data = json.loads(program)
    places = [(at, key) for at, key in json_mutations.places(data) if type(at[key]) is int]
    if rng.random() < 0.6:
        for at, key in rng.sample(places, rng.choice((1, 1, 2))):
            at[key] = rng.choice((0, 1, -1, at[key] + 1, at[key] - 1, 256, 4096, 1 << 20, 1 << 40, 2**63, -(2**31)))
        return json.dumps(data)
    return json_mutations.mutated(data, rng)


def _program_changed(batch: Batch) -> None:
    save(network_support.build(network_support.two_convolutions(), schedsearch.detect("cpu")), Path("good.ssx"))
    with contextlib.closing(sqlite3.connect("good.ssx")) as connection:
        (program,) = connection.execute("SELECT program FROM executable").fetchone()
    for seed in batch.each():
        rng = batch.random(seed)
        shutil.copy("good.ssx", "changed.ssx")
        text = _changed(program, rng)
        with contextlib.closing(sqlite3.connect("changed.ssx")) as connection, connection:
            connection.execute("UPDATE executable SET program = ?", (text,))
        if rng.random() < 0.1:
            ended = told.command(batch.folder, "run", "changed.ssx", "--repeat", "0")
            batch.check(seed, ended.status in (2, 6) or text == program, f"it runs untrusted: exit {ended.status}")
        told.command(batch.folder, "records", "trust", "changed.ssx")
        ended = told.command(batch.folder, "run", "changed.ssx", "--repeat", "0")
        for wrong in told.refusals(ended, (0, 2, 3, 6), ("changed.ssx",)):
            batch.failed(seed, wrong)


SCENARIOS = [
    Scenario(
        "store.replaced", "the database of an open KernelCache is replaced, damaged, removed and restored", _replaced,
        batch=10, short=2,
    ),
    Scenario(
        "store.state-of-others", "the state folder or the key in it belongs to others, or others may write it",
        _state_of_others, share=4.0, batch=20, short=6,
    ),
    Scenario(
        "store.program-changed", "the program of a trusted model.ssx is changed", _program_changed, batch=20, short=6,
    ),
]  # fmt: skip
