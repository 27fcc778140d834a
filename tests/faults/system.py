"""What surrounds a run fails: disks, terminals, pipes, locks, clocks, limits, and other processes on the same database."""

from __future__ import annotations

import functools
import importlib
import os
import resource
import shutil
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from . import inject, lab, runs
from .inject import Moment, Strike
from .scenario import Batch, Scenario

# Exit codes that tell the caller what happened; 1 means that a task has no valid configuration.
_REFUSED = (3, 6, 74)


def _fail(batch: Batch, seed: int, texts: Iterator[str]) -> None:
    for text in texts:
        batch.failed(seed, text)


def _all_held(ran: list[runs.Run], plan: runs.Plan) -> Iterator[str]:
    """What must hold after the last of some runs, which met no fault."""
    stored = runs.records(ran[-1].db)
    yield from runs.complete(ran[-1], plan)
    yield from runs.nothing_lost(ran, stored)
    yield from runs.each_tried_once(ran, stored, plan)
    yield from runs.blamed(stored, 0)
    yield from runs.right_best(ran[-1].db)


def _clean(ran: runs.Run, statuses: Collection[int]) -> Iterator[str]:
    """A run that cannot go on says so without a traceback and with an exit status that means what happened."""
    if ran.ended.status not in statuses:
        yield f"status {ran.ended.status}, not one of {sorted(statuses)}: {ran.ended.err[-1500:]}"
    if "Traceback" in ran.ended.err:
        yield f"a traceback: {ran.ended.err[-1500:]}"
    told = ran.ended.err.strip() or ran.ended.status in (0, 141, None) or ran.ended.status < 0  # 141: as `yes | head`
    if not told:
        yield f"status {ran.ended.status} without a word"


Prepare = Callable[[Batch, int], Callable[[], None]]


def _one_after_another(*ways: Prepare, statuses: Collection[int] = (0, *_REFUSED)) -> Callable[[Batch], None]:
    """A scenario with several struck runs into one database, each with one more candidate, and a last one without one.

    Args:
        ways: functions that give the function to call in the process of a run; one of them is chosen.
        statuses: the exit statuses that a struck run may have.
    """

    def run(batch: Batch) -> None:
        struck = []
        for number, seed in enumerate(batch.each()):
            way = batch.random(seed, "way").choice(ways)
            plan = runs.Plan({runs.HEALTHY: [number]})
            struck.append(runs.finish(runs.start(plan, batch.folder, f"run{number}", way(batch, seed))))
            _fail(batch, seed, _clean(struck[-1], statuses))
        plan = runs.Plan({runs.HEALTHY: range(1 + len(struck))})
        last = runs.tune(plan, batch.folder)
        _fail(batch, batch.seeds[0], _all_held([*struck, last], plan))

    return run


def _small_files(batch: Batch, seed: int) -> Callable[[], None]:
    limit = batch.random(seed).randrange(20_000, 400_000)

    def prepare() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return prepare


def _few_pages(batch: Batch, seed: int) -> Callable[[], None]:
    more = batch.random(seed).randrange(0, 30)

    def prepare() -> None:
        connect = sqlite3.connect

        def limited(*args: object, **named: object) -> sqlite3.Connection:
            connection = connect(*args, **named)  # type: ignore[call-overload]
            connection.execute(f"PRAGMA max_page_count = {20 + more}")
            return connection

        sqlite3.connect = limited  # type: ignore[assignment]

    return prepare


def _output_full(batch: Batch, seed: int) -> Callable[[], None]:
    return lambda: os.dup2(os.open("/dev/full", os.O_WRONLY), 1) and None


def _output_closed(batch: Batch, seed: int) -> Callable[[], None]:
    """As `schedsearch tune --json | head -n 1`."""
    lines = batch.random(seed).randrange(0, 4)

    def prepare() -> None:
        read, write = os.pipe()
        if not os.fork():
            os.close(write)
            with os.fdopen(read) as pipe:
                for _ in range(lines):
                    pipe.readline()
            os._exit(0)
        os.close(read)
        os.dup2(write, 1)
        os.close(write)

    return prepare


def _errors_closed(batch: Batch, seed: int) -> Callable[[], None]:
    descriptors = batch.random(seed).choice([(2,), (0,), (0, 2)])

    def prepare() -> None:
        for fd in descriptors:
            os.close(fd)

    return prepare


def _few_descriptors(batch: Batch, seed: int) -> Callable[[], None]:
    limit = batch.random(seed).randrange(6, 40)

    def prepare() -> None:
        from schedsearch.processes import restarts

        assert hasattr(restarts, "LONGEST_WAIT_S")
        restarts.LONGEST_WAIT_S = 0.5  # before a child is started again; a run gives up after a minute of waiting
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

    return prepare


def _clock_jumps(batch: Batch, seed: int) -> Callable[[], None]:
    folder = Path(__file__).parent / "clock"

    def prepare() -> None:
        os.environ["FAULTS_CLOCK"] = str(seed)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
        sys.path.insert(0, str(folder))
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")

    return prepare


def _struck_from_outside(act: Callable[[Batch, int, Path], None]) -> Callable[[Batch], None]:
    """A scenario in which `act(batch, seed, db)` is called in a run's process, once for each try. It must change nothing."""

    def run(batch: Batch) -> None:
        strikes = []
        plan = runs.Plan({runs.HEALTHY: range(len(batch.seeds))})
        db = batch.folder / "records.db"
        for number, seed in enumerate(batch.seeds):
            rng = batch.random(seed)
            moment: Moment = rng.choice(["BuildTask", "Prepare", "Run", "append"])
            hit = functools.partial(_call_later, act, batch, seed, db)
            strikes.append(Strike(moment, number, rng.random() * 0.2, hit, "self"))
        ran = runs.tune(plan, batch.folder, lambda: inject.install(strikes))
        _fail(batch, batch.seeds[0], _all_held([ran], plan))

    return run


def _call_later(act: Callable[[Batch, int, Path], None], batch: Batch, seed: int, db: Path, pid: int) -> None:
    act(batch, seed, db)


def _lock(batch: Batch, seed: int, db: Path) -> None:
    """Another program writes for a while."""
    with sqlite3.connect(db, timeout=10.0) as other:
        other.execute("BEGIN IMMEDIATE")
        time.sleep(batch.random(seed, "lock").uniform(0.1, 3.0))
        other.rollback()


def _remove_builds(batch: Batch, seed: int, db: Path) -> None:
    """A cleaner of temporary files removes the folder that the builders share."""
    for folder in Path(os.environ["TMPDIR"]).glob("schedsearch-builds-*"):
        shutil.rmtree(folder, ignore_errors=True)


def _database_struck(*acts: Callable[[Batch, int, Path], None]) -> Callable[[Batch], None]:
    """A scenario in which somebody removes or damages the database during a run. The next one says so or goes on."""

    def run(batch: Batch) -> None:
        (seed,) = batch.seeds
        rng = batch.random(seed)
        plan = runs.Plan({runs.HEALTHY: [0]})
        moment: Moment = rng.choice(["BuildTask", "Prepare", "Run", "append", "Race", "finish"])
        db, act = batch.folder / "records.db", rng.choice(acts)
        hit = functools.partial(_call_later, act, batch, seed, db)
        strike = Strike(moment, 0, rng.random() * 0.2, hit, "self")
        struck = runs.finish(runs.start(plan, batch.folder, "struck", lambda: inject.install([strike])))
        _fail(batch, seed, _clean(struck, (0, *_REFUSED)))
        if seed % 4:  # a look costs less than a run
            look = lab.start(functools.partial(_list_records, db), batch.folder, "look").wait(30.0)
            _fail(batch, seed, _clean(runs.Run(look, db), (0, 6)))
            return
        last = runs.tune(plan, batch.folder)
        if last.ended.status == 0:
            _fail(batch, seed, iter(runs.complete(last, plan)))
            _fail(batch, seed, iter(runs.right_best(last.db)))
        else:
            _fail(batch, seed, _clean(last, (6,)))

    return run


def _list_records(db: Path) -> None:
    from schedsearch.cli import console

    sys.argv = ["schedsearch", "records", "list", "--db", str(db)]
    console.run()


def _remove(batch: Batch, seed: int, db: Path) -> None:
    for path in (db, db.with_name("records.db-wal"), db.with_name("records.db-shm")):
        path.unlink(missing_ok=True)


def _replace(batch: Batch, seed: int, db: Path) -> None:
    other = db.with_name("other.db")
    other.write_text("not a database, and rather long\n" * 1000)
    other.replace(db)


def _overwrite(batch: Batch, seed: int, db: Path) -> None:
    rng = batch.random(seed, "overwrite")
    with db.open("r+b") as file:
        file.seek(rng.randrange(max(1, db.stat().st_size)))
        file.write(rng.randbytes(rng.randrange(1, 5000)))


def _truncate(batch: Batch, seed: int, db: Path) -> None:
    os.truncate(db, batch.random(seed, "truncate").randrange(db.stat().st_size + 1))


def _with_reader(batch: Batch) -> None:
    """A dashboard reads all the time: it sees only growth, and it does not disturb."""
    (seed,) = batch.seeds
    plan = runs.Plan({runs.HEALTHY: [0, 1]})
    db = batch.folder / "records.db"

    def read() -> None:
        from schedsearch.errors import DatabaseError
        from schedsearch.records.store import Store

        seen, pause_s = 0, batch.random(seed).choice([0.02, 0.1])
        while True:
            time.sleep(pause_s)
            try:
                with Store.open(db, readonly=True) as store:
                    count = len(store.history())
            except DatabaseError:
                if seen:
                    raise
                continue  # it is being created
            assert count >= seen, f"{count} records after {seen}"
            seen = count

    process, reader = runs.start(plan, batch.folder), lab.start(read, batch.folder, "reader")
    ran = runs.finish(process)
    reader.poll()
    if reader.ended is not None:
        batch.failed(seed, f"the reader ended: {reader.ended.err[-1500:]}")
    else:
        reader.kill()
    _fail(batch, seed, _all_held([ran], plan))


def _two_runs(batch: Batch) -> None:
    """Two runs of the same task into one new database begin at about the same time.

    They share the device, for which one waits, or have devices of their own, so that both write at once.
    """
    (seed,) = batch.seeds
    rng = batch.random(seed)
    plan = runs.Plan({runs.HEALTHY: [0]})
    apart = rng.random() < 0.5

    def prepare(name: str) -> Callable[[], None]:
        def own_device() -> None:
            folder = batch.folder / name
            folder.mkdir()
            os.environ["TMPDIR"] = str(folder)

        return own_device if apart else lambda: None

    processes = []
    for name in ("first", "second"):
        processes.append(runs.start(plan, batch.folder, name, prepare(name)))
        time.sleep(rng.choice([0.0, rng.random() * 0.05, rng.random() * 2.0]))
    both = [runs.finish(process) for process in processes]
    if not apart:  # the second waited, and had nothing left to do
        _fail(batch, seed, _all_held(both, plan))
    stored = runs.records(both[0].db)
    for ran in both:
        _fail(batch, seed, iter(runs.complete(ran, plan)))
    _fail(batch, seed, iter(runs.nothing_lost(both, stored)))
    _fail(batch, seed, iter(runs.right_best(both[0].db)))


_TERMINAL = _one_after_another(_output_full, _output_closed, _errors_closed, statuses=(0, *_REFUSED, 141))
_DISK_FULL = _one_after_another(_small_files, _few_pages)

SCENARIOS = [
    Scenario("system.disk-full", "files may not grow, or SQLite finds no free page", _DISK_FULL, batch=10, short=2),
    Scenario("system.terminal", "standard output is full or closed; error or input is closed", _TERMINAL, batch=10, short=3),
    Scenario("system.descriptors", "the run may open few files", _one_after_another(_few_descriptors), batch=10, short=1),
    Scenario("system.builds-removed", "the folder of builds goes", _struck_from_outside(_remove_builds), batch=10, short=2),
    Scenario(
        "system.clock", "the wall clock jumps by up to 30 years, again and again",
        _one_after_another(_clock_jumps, statuses=(0,)), batch=10,
    ),
    Scenario("system.reader", "another process reads the database all the time", _with_reader),
    Scenario("system.two-runs", "two runs create one database and share it, and perhaps the device", _two_runs, short=1),
    Scenario("database.locked", "another program locks the database for up to 3 s", _struck_from_outside(_lock), batch=10),
    Scenario("database.gone", "the database is removed or replaced", _database_struck(_remove, _replace), short=1),
    Scenario("database.damaged", "the database is overwritten or cut", _database_struck(_overwrite, _truncate), short=1),
]  # fmt: skip
