"""LSTMs of real sizes on the CPU, beside ONNX Runtime with one and two threads, each a network of one node.

    python benchmarks/recurrences.py --build            builds and checks the networks, untuned, into a folder
    python benchmarks/recurrences.py --out lstm.json    times them; all take turns

The sizes are those of silero-vad (one step, and 32 of its sequence model), openwakeword's hey_mycroft and ddddocr.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import common
import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper

import schedsearch
from schedsearch.device.detect import detect

CASES: dict[str, dict[str, Any]] = {
    "silero-vad, a step": dict(t=1, i=128, h=128, states=True),
    "silero-vad, a sequence": dict(t=32, i=128, h=128, states=True),
    "hey_mycroft, first layer": dict(t=16, i=96, h=64, both=True),
    "hey_mycroft, second layer": dict(t=16, i=128, h=32, both=True),
    "ddddocr": dict(t=50, i=512, h=512, both=True),
}
WARM_UP, TURN_S = 20, 0.5  # a short turn of a large cell would find its weights in memory, not in the cache


def model_of(t: int, i: int, h: int, both: bool = False, states: bool = False) -> Any:
    """An LSTM of one row with constant weights, whose results are all read."""
    rng, d = np.random.default_rng(0), 2 if both else 1
    shapes = {"w": (d, 4 * h, i), "r": (d, 4 * h, h), "b": (d, 8 * h)}
    weights = [numpy_helper.from_array((rng.standard_normal(s) / h**0.5).astype(np.float32), n) for n, s in shapes.items()]
    ports = {"x": (t, 1, i), **({"h": (d, 1, h), "c": (d, 1, h)} if states else {})}
    node = helper.make_node(
        "LSTM", ["x", *shapes, "", *[name for name in ports if name != "x"]], ["y", "y_h", "y_c"], "lstm", hidden_size=h,
        direction="bidirectional" if both else "forward",
    )  # fmt: skip
    inputs = [helper.make_tensor_value_info(name, 1, shape) for name, shape in ports.items()]
    outputs = [helper.make_tensor_value_info(name, 1, None) for name in ("y", "y_h", "y_c")]
    graph = helper.make_graph([node], "lstm", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)


def place_of(folder: Path, name: str, suffix: str) -> Path:
    return folder / f"{name.replace(', ', '_').replace(' ', '_')}.{suffix}"


def build(folder: Path) -> None:
    for name, sizes in CASES.items():
        onnx.save(model_of(**sizes), place_of(folder, name, "onnx"))
        out = place_of(folder, name, "ssx")
        schedsearch.build(
            place_of(folder, name, "onnx"), target="cpu", db=folder / "none.db", out=out, progress=False
        ).close()


def row_of(folder: Path, name: str, seconds: float) -> dict[str, Any]:
    """Median microseconds of a call of each, and the least."""
    net, path = schedsearch.load(place_of(folder, name, "ssx")), place_of(folder, name, "onnx")
    rng = np.random.default_rng(1)
    inputs = {
        port.name: rng.standard_normal([each.dim_value for each in port.type.tensor_type.shape.dim]).astype(np.float32)
        for port in onnx.load(path).graph.input
    }
    arrays = list(inputs.values())
    runs: dict[str, Callable[[], object]] = {"ours": lambda: net(*arrays)}
    for threads in (1, 2):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        runs[f"ort{threads}"] = lambda session=session: session.run(None, inputs)
    taken: dict[str, list[float]] = {each: [] for each in runs}
    for run in runs.values():
        for _ in range(WARM_UP):
            run()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for each, run in runs.items():
            until = time.perf_counter() + TURN_S
            while (begin := time.perf_counter()) < until:
                run()
                taken[each].append(time.perf_counter() - begin)
    row: dict[str, Any] = {"name": name, **CASES[name]}
    for each, times in taken.items():
        row |= {f"{each}_us": round(1e6 * statistics.median(times), 1), f"{each}_least_us": round(1e6 * min(times), 1)}
    return row | {"ratio": round(min(row["ort1_us"], row["ort2_us"]) / row["ours_us"], 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", action="store_true", help="build the networks; times nothing")
    parser.add_argument("--folder", default="build/recurrences", type=Path, help="where the networks are")
    parser.add_argument("--seconds", default=4.0, type=float, help="for each size")
    parser.add_argument("--out", help="write the results here as JSON")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.build:
        build(args.folder)
        return
    rows = [row_of(args.folder, name, args.seconds) for name in CASES]
    header = ("", "ours, us", "ONNX Runtime, us", "2 threads, us", "ratio")
    print(common.table(header, [(r["name"], r["ours_us"], r["ort1_us"], r["ort2_us"], r["ratio"]) for r in rows]))
    print(f"geometric mean {common.geometric_mean([row['ratio'] for row in rows]):.2f}")
    versions = {name: version(name) for name in ("schedsearch", "numba", "numpy", "onnx", "onnxruntime", "llvmlite")}
    target = detect("cpu")
    machine = {"cpu": f"{target.name}, {target.simd_bits}-bit SIMD", "cores": target.sms}
    common.write(args.out, {"versions": versions, "machine": machine, "rows": rows})


if __name__ == "__main__":
    main()
