"""`schedsearch doctor`: shows the devices, tools and database of this machine, and any problems with them."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from schedsearch.cli import render
from schedsearch.cli.extract import INPUT_OPTION, SHAPE_OPTION
from schedsearch.cli.options import CARDS, fleet_options
from schedsearch.errors import DatabaseError, DeviceError, UsageError
from schedsearch.measurement import DEFAULT_DB
from schedsearch.text import printable
from schedsearch.typed import JsonObject

_PACKAGES = (
    "schedsearch", "numba", "llvmlite", "numba-cuda", "numba-cuda-mlir", "cuda-bindings", "nvidia-nvvm", "nvidia-nvjitlink",
    "nvidia-nvjitlink-cu12", "nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12", "numpy", "xgboost", "xgboost-cpu", "sqlalchemy",
    "pydantic", "torch", "cupy",
)  # fmt: skip


@click.command()
@click.option("--db", metavar="FILE", help="Also check this record store. Default: records.db if it exists.")
@click.option(
    "--coverage",
    "model",
    metavar="MODEL.onnx|LAYERS.yaml",
    type=click.Path(dir_okay=False),
    help="Instead show how many layers of this have records.",
)
@click.option("--target", "selector", metavar="TARGET", help=f"With --coverage: auto, cpu, cuda, cuda:N, or {CARDS}.")
@click.option(
    "--dtype", type=click.Choice(["float16", "bfloat16", "float32"]), help="With --coverage of a model: as of build."
)
@SHAPE_OPTION
@INPUT_OPTION
@click.option("--scheduler", metavar="ADDRESS", help="Instead show the workers of this Dask scheduler.")
@click.option("--allow-mixed", is_flag=True, help="With --scheduler: workers may have different compilers.")
@fleet_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(
    db: str | None,
    model: str | None,
    selector: str | None,
    dtype: str | None,
    shapes: dict[str, list[int]],
    inputs: dict[str, Any],
    scheduler: str | None,
    allow_mixed: bool,
    tls: str | None,
    trust_network: bool,
    as_json: bool,
) -> None:
    """Show devices, driver, clocks, versions of tools and libraries, the state of the database, and all problems.

    Works without a GPU. Exits with 6 when the database cannot be used or is damaged.

    With --coverage it shows how many layers of a model have records for a card, in the database or shipped with the
    package, what share of the time these cover, and what tuning the rest would take. The card need not be here.

    With --scheduler it shows workers, cards, clocks and versions of a fleet. Exits with 3 when no run would begin there.
    """
    if scheduler is not None:
        from schedsearch.cli.doctor_fleet import show
        from schedsearch.fleet.connection import Connection

        show(Connection(scheduler, tls, trust_network, allow_mixed), as_json)
        return
    if tls or trust_network or allow_mixed:
        raise click.UsageError("--tls, --trust-network and --allow-mixed are for --scheduler ADDRESS")
    if model is not None:
        if db is not None:
            _check_exists(db)
        _coverage(model, db or DEFAULT_DB, selector or "auto", dtype, shapes, inputs, as_json)
        return
    if selector or dtype or shapes or inputs:
        raise click.UsageError("--target, --dtype, --shape and --input are for --coverage MODEL")
    gpus, problems = _gpus()
    report: JsonObject = {
        "system": _system(),
        "cpu": _cpu(),
        "driver": _driver(),
        "gpus": gpus,
        "packages": _versions(),
        "build_cache": _build_cache(),
        "shipped": _shipped([gpu["key"] for gpu in gpus]),
        "database": None,
    }
    database_error: DatabaseError | None = None
    if db is not None or Path(DEFAULT_DB).exists():
        try:
            report["database"] = _database(db or DEFAULT_DB)
        except DatabaseError as error:
            database_error = error
    problems += [*_compiler_problems(), *_state_problems()]
    report["problems"] = problems + ([str(database_error)] if database_error else [])
    if as_json:
        render.echo_json(report)
    else:
        _print(report)
    if database_error is not None:
        raise database_error
    if report["database"] and report["database"]["problems"]:
        raise DatabaseError(
            f"{report['database']['path']} is damaged: {'; '.join(report['database']['problems'])}; "
            "save what can be read: schedsearch records export"
        )


def _check_exists(db: str) -> None:
    """Raises DatabaseError if it is a file that is missing or no database; one of a server is refused later."""
    from schedsearch.records.location import server_url

    if not server_url(db):
        _database(db)


def _coverage(
    model: str,
    db: str,
    selector: str,
    dtype: str | None,
    shapes: dict[str, list[int]],
    inputs: dict[str, Any],
    as_json: bool,
) -> None:
    from schedsearch.device.detect import detect
    from schedsearch.executable.coverage import coverage

    target = detect(selector, presets=True)
    found = coverage(model, db=db, target=target, dtype=dtype, shapes=shapes, inputs=inputs)
    if as_json:
        render.echo_json(found.to_json())
        return
    for line in found.lines:
        render.say(printable(line))
    rows = [
        (each.label, each.source, str(each.count), render.duration(each.time_ns), each.reason)
        for each in found.layers
        if each.source == "none"
    ]
    if rows:
        render.say(render.table(("without a record", "", "count", "time", "estimate"), rows, right=("count", "time")))


def _system() -> JsonObject:
    return {
        "os": platform.platform(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "cores": len(os.sched_getaffinity(0)),
    }


def _cpu() -> JsonObject:
    from schedsearch.device.detect import detect
    from schedsearch.measure.clocks import read_clocks

    target = detect("cpu")
    return {
        "key": target.key,
        "name": target.name,
        "simd_bits": target.simd_bits,
        "last_level_cache_bytes": target.l2_bytes,
        "clocks": read_clocks(target),
    }


def _build_cache() -> JsonObject:
    """The folder of compiled pieces that are kept between runs, their number and size, or why the cache is not used."""
    from schedsearch.backend.build_cache import LIMIT_BYTES, BuildCache, cache_state

    state = cache_state()
    pieces, nbytes = BuildCache(state.folder).size() if state.folder is not None and state.problem is None else (0, 0)
    folder = None if state.folder is None else str(state.folder)
    return {"folder": folder, "pieces": pieces, "bytes": nbytes, "limit_bytes": LIMIT_BYTES, "problem": state.problem}


def _compiler_problems() -> list[str]:
    """What the installed compiler for GPUs excludes, because of faults that are known of its version; or why the one that
    `SCHEDSEARCH_COMPILER` names cannot be used."""
    from schedsearch.backend import compilers, ptxas

    mismatch, unusable = ptxas.mismatch(), ""
    if os.environ.get(compilers.ENVIRONMENT_VARIABLE):
        try:
            compilers.usable()
        except UsageError as error:
            unusable = str(error)
    return [*ptxas.exclusions(ptxas.linker_version()), *filter(None, [mismatch, unusable])]


def _shipped(keys: list[str]) -> JsonObject:
    """Key of a device -> its shipped records, or why there are none."""
    from schedsearch.device.detect import detect
    from schedsearch.records.shipped import shipped_records

    return {key: shipped_records(key).summary for key in dict.fromkeys([*keys, detect("cpu").key])}


def _state_problems() -> list[str]:
    """Why the folder of this machine's key is not used."""
    from schedsearch.records import state

    try:
        found = state.objection()
    except DatabaseError as error:
        found = str(error)
    return [found] if found else []


def _driver() -> JsonObject:
    """The kernel driver's version and the CUDA version that it supports; None without a driver."""
    found: JsonObject = {"version": None, "cuda": None}
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        text = ""
    if match := re.search(r"Kernel Module.*?(\d+\.\d+(?:\.\d+)?)", text):
        found["version"] = match[1]
    try:
        from schedsearch.device.cuda_driver import driver_version

        found["cuda"] = driver_version()
    except DeviceError:
        pass
    return found


def _gpus() -> tuple[list[JsonObject], list[str]]:
    """Every GPU with its clocks and processes, and the problems found; without a GPU, the reason."""
    from schedsearch.device.cuda_driver import iterate_devices
    from schedsearch.measure.clocks import read_clocks
    from schedsearch.target import Target

    gpus: list[JsonObject] = []
    try:
        for ordinal, facts in enumerate(iterate_devices()):
            target = Target(kind="cuda", ordinal=ordinal, **facts)
            major, minor = target.compute_capability
            gpus.append(
                {
                    "selector": f"cuda:{ordinal}",
                    "key": target.key,
                    "name": target.name,
                    "uuid": target.uuid,
                    "compute_capability": f"{major}.{minor}",
                    "sms": target.sms,
                    "memory_bytes": target.memory_bytes,
                    "shared_bytes_per_block": target.shared_bytes_per_block,
                    "l2_bytes": target.l2_bytes,
                    "max_clock_mhz": target.clock_khz // 1000,
                    "clocks": read_clocks(target),
                    "processes": _processes(target.uuid),
                }
            )
    except DeviceError as error:
        reason = str(error).partition(";")[0]  # the remedy is for those who asked for a GPU
        return [], [f"no GPU: {reason}; commands take the CPU unless --target says otherwise"]
    problems = [
        f"{gpu['selector']} is used by {render.counted(len(gpu['processes']), 'process')}; times will vary"
        for gpu in gpus
        if gpu["processes"]
    ]
    from schedsearch.backend import compilers

    named = os.environ.get(compilers.ENVIRONMENT_VARIABLE)  # `_compiler_problems` tells of it
    if gpus and not named and (problem := compilers.chosen().problem()):
        problems.append(f"there is a GPU, but {problem}")
    return gpus, problems


def _processes(uuid: str) -> list[dict[str, str]]:
    """Processes that compute on a GPU, as nvidia-smi reports them; inside a container it may see none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, f"--id={uuid}", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return []
    fields = [line.split(", ") for line in output.splitlines() if line.count(", ") >= 2]
    return [{"pid": parts[0], "name": ", ".join(parts[1:-1]), "memory": parts[-1]} for parts in fields]


def _versions() -> dict[str, str]:
    return {name: found for name in _PACKAGES if (found := _version_of(name)) is not None}


def _version_of(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _database(path: str) -> JsonObject:
    from schedsearch.records.store import Store

    with Store.open(path, create=False, readonly=True) as store:
        return store.health()


def _print(report: JsonObject) -> None:
    system, cpu, driver = report["system"], report["cpu"], report["driver"]
    rows = [
        ("system", f"{system['os']}, {system['cores']} usable cores"),
        ("python", f"{system['python']} ({system['executable']})"),
        (
            "cpu",
            f"{cpu['name']}, {cpu['simd_bits']}-bit SIMD, cache {render.size_bytes(cpu['last_level_cache_bytes'])}",
        ),
        ("cpu clocks", render.config_text(cpu["clocks"]) or "unknown"),
        ("nvidia driver", f"{driver['version'] or 'none'}, CUDA {driver['cuda'] or 'none'}"),
    ]
    for gpu in report["gpus"]:
        rows += [
            (
                gpu["selector"],
                f"{gpu['name']}, compute capability {gpu['compute_capability']}, {gpu['sms']} SMs, "
                f"{render.size_bytes(gpu['memory_bytes'])}, up to {gpu['max_clock_mhz']} MHz",
            ),
            ("  uuid", gpu["uuid"]),
            ("  clocks", render.config_text(gpu["clocks"]) or "unknown"),
        ]
        rows += [("  process", f"{process['pid']} {process['name']} {process['memory']}") for process in gpu["processes"]]
    rows += list(report["packages"].items())
    cache = report["build_cache"]
    size = f"{cache['pieces']} pieces, {render.size_bytes(cache['bytes'])} of {render.size_bytes(cache['limit_bytes'])}"
    use = f"not used: {cache['problem']}" if cache["problem"] else size
    rows += [("shipped", f"{key}: {text}") for key, text in report["shipped"].items()]
    rows.append(("build cache", f"{cache['folder']}: {use}" if cache["folder"] else use))
    if report["database"]:
        health = report["database"]
        rows.append(
            (
                "database",
                f"{health['path']}: {render.counted(health['records'], 'record')}, "
                f"{render.counted(health['bests'], 'best record')}, "
                f"{render.counted(health['ranges'], 'range')} of sizes, "
                f"{render.size_bytes(health['size_bytes'])}, schema {health['schema_version']}, "
                f"{'ours' if health['created_here'] else 'of another machine'}, {'; '.join(health['problems']) or 'sound'}",
            )
        )
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        render.say(printable(f"{name.ljust(width)}  {value}"))
    for problem in report["problems"]:
        render.say(printable(f"! {problem}"))
