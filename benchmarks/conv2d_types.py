"""Convolutions of int8, TF32, float32 and FP8 against cuDNN and against our own fp16, all in one run.

    python benchmarks/conv2d_types.py --kind int8                  the 13 shapes of conv2d_fp16.py, two large ones, TVM's
    python benchmarks/conv2d_types.py --kind int8 --suite networks --networks networks.json --trials 64
    python benchmarks/conv2d_types.py --kind int8 --suite cases --cases operator_cases.json --trials 1
    python benchmarks/conv2d_types.py --kind tf32                  float32 by TF32, against cuDNN with TF32
    python benchmarks/conv2d_types.py --kind fp32                  float32, against cuDNN without TF32
    python benchmarks/conv2d_types.py --kind float8_e4m3           against our own fp16

int8 is int8 to int8 with bias, relu and requantisation fused. Its peers are cuDNN's int8 with the same graph, the fastest
of all plans that its frontend offers (`--plan-time` seconds a layer), and cuDNN's fused fp16 convolution, the faster layout.
`fp16_us` is our own fp16 kernel of the same layer with bias and relu, tuned in the same run with the same number of trials.

Needs a CUDA device and PyTorch; int8's peer also needs nvidia-cudnn-frontend, and is left out with a reason without it.
Everything is timed cold in a CUDA graph; see conv2d_fp16.py. --out is written after every layer.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import common
from convolutions import (
    SHAPES,
    Layer,
    fastest_by_template,
    integer_cases,
    kept,
    layers_of,
    network_sums,
    report,
    run_facts,
    square,
)

import schedsearch
from schedsearch.errors import Interrupted, SchedsearchError

if TYPE_CHECKING:
    import torch

LARGE = [(128, 28, 28, 512, 512, 3, 1, 1), (32, 56, 56, 256, 256, 3, 1, 1)]
TVM = [(1, 56, 56, 64, 64, 3, 1, 1)]
FUSED = ("bias", "relu")
STEM_CHANNELS = 16  # cuDNN's int8 needs multiples of 4; the RGB layer is padded to this for it


@dataclass(frozen=True)
class Kind:
    """An element type to time.

    Attributes:
        params: of our workload.
        peers: names of entries of `PEERS`, except "fp16": our own kernel.
        against: the fields of a row that `ratio` compares with, the least of them.
    """

    params: Mapping[str, Any]
    peers: tuple[str, ...]
    against: tuple[str, ...]


KINDS = {
    "int8": Kind(
        {"dtype": "int8", "epilogue": (*FUSED, {"requantise": {"to": "int8"}})},
        ("cudnn_int8", "cudnn_fp16", "fp16"),
        ("cudnn_int8_us", "cudnn_fp16_us"),
    ),
    "tf32": Kind({"dtype": "float32", "precision": "tf32"}, ("cudnn_tf32",), ("cudnn_tf32_us",)),
    "fp32": Kind({"dtype": "float32", "precision": "fp32"}, ("cudnn_fp32",), ("cudnn_fp32_us",)),
    "float8_e4m3": Kind({"dtype": "float8_e4m3"}, ("cudnn_fp16", "fp16"), ("fp16_us",)),
    "float8_e5m2": Kind({"dtype": "float8_e5m2"}, ("cudnn_fp16", "fp16"), ("fp16_us",)),
}


def own_fp16(workload: schedsearch.Workload) -> schedsearch.Workload:
    """The fp16 layer that does the same work, with bias and relu if the workload has them."""
    fused = tuple(stage.name for stage in workload.epilogue if stage.name in FUSED)
    sizes = {
        name: workload.params[name]
        for name in ("n", "h", "w", "c", "k", "r", "s", "stride", "padding", "dilation", "groups")
    }
    return schedsearch.Workload.conv2d(**sizes, dtype="float16", epilogue=fused)


def draw(workload: schedsearch.Workload) -> list[torch.Tensor]:
    """Operands on the device in the order of the signature, without y. Integers fill their range.

    Scales bring the results into the range of the output, so that neither zeros nor saturated values dominate.
    """
    import torch

    found = []
    deviation = 74.0**2 * workload.work.reduction**0.5  # 74: of numbers from -128 to 127
    for spec in workload.signature:
        kind = getattr(torch, {"float8_e4m3": "float8_e4m3fn"}.get(spec.dtype, spec.dtype))
        if spec.dtype in ("int8", "uint8"):
            low, high = torch.iinfo(kind).min, torch.iinfo(kind).max + 1
            found.append(torch.randint(low, high, spec.shape, device="cuda", dtype=kind))
        elif spec.dtype == "int32":
            found.append(torch.randint(-1000, 1000, spec.shape, device="cuda", dtype=kind))
        elif spec.role == "scale":
            found.append(torch.full(spec.shape, 40.0 / deviation, device="cuda", dtype=kind))
        else:
            found.append(torch.randn(spec.shape, device="cuda").to(kind))
    return found


# --- Peers: each returns microseconds, and may add facts to the row ------------------------------------------------------
def cudnn_int8(
    workload: schedsearch.Workload, sets: Sequence[list[torch.Tensor]], row: dict[str, Any], limit_s: float
) -> float:
    """The fastest of cuDNN's int8 plans. `row` gets its name, how many ran, and how far its result is from ours at most."""
    import cudnn_plans
    import torch

    layer = workload if workload.c % 4 == 0 else workload.replace(c=STEM_CHANNELS)
    operands = []
    for x, weight, bias, scale in sets:
        if layer is not workload:
            x, weight = (torch.nn.functional.pad(each, (0, STEM_CHANNELS - workload.c)) for each in (x, weight))
        operands.append((x, weight, bias.float(), scale, cudnn_plans.output(layer)))
    best, best_us, count = None, float("inf"), 0
    for plan in cudnn_plans.plans(layer, operands[0], limit_s):
        count += 1
        us = common.cold_graph_us([plan.launch(each) for each in operands])
        if us < best_us:
            best, best_us = plan, us
    if best is None:
        raise ValueError(f"no plan of cuDNN ran within {limit_s:.0f} s")
    best.launch(operands[0])()
    row |= {"cudnn_int8_plan": best.name, "cudnn_int8_plans": count}
    row["cudnn_int8_output"] = operands[0][-1]
    return best_us


def cudnn_fp16(workload: schedsearch.Workload, sets: Sequence[Any], row: dict[str, Any], limit_s: float) -> float:
    """cuDNN's fp16 convolution of the same layer, fused with bias and relu if ours is; the faster layout."""
    return _torch_us(own_fp16(workload), len(sets), row)


def cudnn_float(workload: schedsearch.Workload, sets: Sequence[Any], row: dict[str, Any], limit_s: float) -> float:
    """cuDNN's float32 convolution, with TF32 if the workload allows it; the faster layout."""
    import torch

    torch.backends.cudnn.allow_tf32 = workload.params["precision"] == "tf32"
    return _torch_us(workload, len(sets), row)


def _torch_us(workload: schedsearch.Workload, count: int, row: dict[str, Any]) -> float:
    import torch_conv2d as peers

    times = {}
    for layout in peers.MEMORY:
        operands = [peers.operands(workload, layout) for _ in range(count)]
        way = peers.fused(workload) if workload.epilogue else functools.partial(peers.convolve, workload)
        try:
            times[layout] = common.cold_graph_us([functools.partial(way, *tensors) for tensors in operands])
        except RuntimeError as error:  # PyTorch's, for a layout that cuDNN does not take
            row.setdefault("failed", {})[f"{workload.dtype} {layout}"] = str(error)[:300]
    return min(times.values())


Peer = Callable[["schedsearch.Workload", "Sequence[list[torch.Tensor]]", dict[str, Any], float], float]
PEERS: dict[str, Peer] = {
    "cudnn_int8": cudnn_int8,
    "cudnn_fp16": cudnn_fp16,
    "cudnn_tf32": cudnn_float,
    "cudnn_fp32": cudnn_float,
}


# --- Rows ---------------------------------------------------------------------------------------------------------------
def our_us(
    workload: schedsearch.Workload, db: str, sets: Sequence[list[torch.Tensor]]
) -> tuple[float, schedsearch.Kernel, Any]:
    """Microseconds of the best kernel in the database, the kernel, and its result for the first set."""
    kernel = schedsearch.compile(workload, db, target="cuda", allow=("exact",))
    steps = [kernel.bind(*tensors) for tensors in sets]
    return common.cold_graph_us(steps), kernel, steps[0]()


def compare(kind: Kind, workload: schedsearch.Workload, db: str, l2_bytes: int, limit_s: float) -> dict[str, Any]:
    """One row: our kernel, and every peer that can compute the layer. A peer that fails is named under `failed`.

    Raises:
        SchedsearchError: there is no kernel.
    """
    import torch

    sets = [draw(workload) for _ in range(common.sets_needed(workload.min_bytes, l2_bytes))]
    row: dict[str, Any] = {"workload": workload.label, "sets": len(sets)}
    row["us"], kernel, result = our_us(workload, db, sets)
    row["template"], row["config"] = kernel.provenance.template, dict(kernel.config)
    row["tflops"] = workload.flops / row["us"] / 1e6
    for name in kind.peers:
        try:
            if name == "fp16":
                half = own_fp16(workload)
                halves = [draw(half) for _ in range(common.sets_needed(half.min_bytes, l2_bytes))]
                row["fp16_us"], *_ = our_us(half, db, halves)
            else:
                row[f"{name}_us"] = PEERS[name](workload, sets, row, limit_s)
        except (ImportError, RuntimeError, ValueError, SchedsearchError) as error:
            row.setdefault("failed", {})[name] = f"{type(error).__name__}: {error}"[:500]
        torch.cuda.empty_cache()
    if (other := row.pop("cudnn_int8_output", None)) is not None:
        row["cudnn_int8_differs_by"] = int((other.int() - result.int()).abs().max())
    return rated(row, kind.against)


def rated(row: dict[str, Any], against: Sequence[str]) -> dict[str, Any]:
    """The row with `peer`, its time as `cudnn_us`, and `ratio`, if a peer of `against` has a time."""
    times = {name: row[name] for name in against if name in row}
    if times:
        row["peer"] = min(times, key=lambda name: times[name])
        row["cudnn_us"] = times[row["peer"]]
        row["ratio"] = row["cudnn_us"] / row["us"]
    if "fp16_us" in row:
        row["fp16_ratio"] = row["fp16_us"] / row["us"]
    return row


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=tuple(KINDS), required=True, help="element type")
    parser.add_argument("--suite", choices=("targets", "networks", "cases"), default="targets")
    parser.add_argument("--networks", metavar="FILE", help="JSON file of --suite networks; see convolutions.network_layers")
    parser.add_argument("--cases", metavar="FILE", help="JSON file of --suite cases; see convolutions.integer_cases")
    parser.add_argument("--network", action="append", help="only this network; may be given several times")
    parser.add_argument("--layers", help="only layers whose label contains this text")
    parser.add_argument("--every", type=int, default=1, help="each n-th of the chosen layers")
    parser.add_argument("--trials", type=int, default=200, help="per shape, those of earlier runs with this --db included")
    parser.add_argument("--time", type=float, help="seconds of tuning over all shapes")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds, after which no further shape is timed")
    parser.add_argument("--plan-time", type=float, default=8.0, help="seconds a layer for cuDNN's int8 plans")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--db", default="benchmark.db")
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--add", action="store_true", help="keep the data in --out of shapes that this run does not time")
    options = parser.parse_args(words)
    if options.every < 1:
        parser.error(f"--every must be at least 1, got {options.every}")
    if (options.suite == "networks") != bool(options.networks) or (options.network and not options.networks):
        parser.error("--suite networks and --networks FILE belong together, and --network to them")
    if (options.suite == "cases") != bool(options.cases):
        parser.error("--suite cases and --cases FILE belong together")
    return options


def chosen(options: argparse.Namespace) -> tuple[list[schedsearch.Workload], list[Layer]]:
    """The workloads to time, each once, and the layers of the networks that they come from."""
    params = KINDS[options.kind].params
    layers: list[Layer] = []
    if options.suite == "networks":
        found, layers = layers_of(options.networks, options.network, params)
    elif options.suite == "cases":
        found = [workload.replace(**params) for workload in integer_cases(options.cases)]
    else:
        shapes = [*SHAPES, *(LARGE + TVM if options.kind == "int8" else [])]
        found = list(dict.fromkeys(square(*shape).replace(**params) for shape in shapes))
    found = [workload for workload in found if (options.layers or "") in workload.label]
    return found[:: options.every], layers


def tuned(options: argparse.Namespace, workloads: Sequence[schedsearch.Workload]) -> tuple[Any, dict[str, Any]]:
    """Tunes all workloads, and our fp16 kernels if they are a peer. Returns the summary, and facts of the run."""
    started = time.perf_counter()
    halves = [own_fp16(workload) for workload in workloads] if "fp16" in KINDS[options.kind].peers else []
    try:
        summary = schedsearch.tune(
            [*workloads, *dict.fromkeys(halves)], options.db, target="cuda", trials=options.trials, time_s=options.time,
            seed=options.seed,
        )  # fmt: skip
    except Interrupted as interrupted:  # what was found so far is compared all the same
        summary = interrupted.summary
    return summary, run_facts(started, summary)


def main() -> None:
    options = arguments()
    started, kind = time.perf_counter(), KINDS[options.kind]
    workloads, layers = chosen(options)
    suite = f"{options.suite}+{options.kind}"
    earlier = kept(options.out if options.add else None, suite)

    import torch

    torch.backends.cudnn.benchmark = True
    torch.set_grad_enabled(False)
    summary, run = tuned(options, workloads)
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    rows: list[dict[str, Any]] = []
    for workload, task in zip(workloads, summary.tasks):
        if time.perf_counter() - started > options.limit:
            print(f"{len(workloads) - len(rows)} shapes are not timed: the time is up")
            break
        try:
            row = compare(kind, workload, options.db, l2_bytes, options.plan_time)
            row["template_us"] = fastest_by_template(workload, options.db)
        except (SchedsearchError, RuntimeError) as error:  # RuntimeError: torch's, including out of memory
            row = {"workload": workload.label, "error": f"{type(error).__name__}: {error}"}
        row["trials"], row["default_us"] = task.trials, task.default_ns and task.default_ns / 1e3
        rows.append(row)
        result = report(suite, earlier, rows, run)
        if layers:
            result["networks"] = network_sums(layers, result["rows"])
        common.write(options.out, result)
        print({name: value for name, value in row.items() if name not in ("config", "template_us")}, flush=True)
    if not rows:
        return
    good = [row for row in result["rows"] if "ratio" in row]
    halves = common.geometric_mean([row["fp16_ratio"] for row in good if "fp16_ratio" in row])
    for name, entry in result.get("networks", {}).items():
        print(f"{name}: {entry}")
    print(f"geometric mean {result['geometric_mean_ratio']:.3f} over {len(good)} of {len(result['rows'])} shapes; "
          f"{halves:.3f} of our fp16; {run['new_trials']} trials in {run['tuning_s']:.0f} s; {summary.shares}")  # fmt: skip


if __name__ == "__main__":
    main()
