"""fp16 convolutions whose channel counts are not multiples of 8, template by template, against cuDNN.

    python benchmarks/awkward.py                                  16 layers, 40 trials for each template that takes them
    python benchmarks/awkward.py --half 1                         the first 8 of them; --half 2: the others
    python benchmarks/awkward.py --templates conv2d_mma,conv2d_stem --trials 24 --layers 1x1
    python benchmarks/awkward.py --compiled                       torch.compile is a further peer

Each template is searched by itself, so that a template that falls behind shows how far. The fastest kernel of all then runs
beside cuDNN (PyTorch, both layouts, benchmark mode) in one process, cold, in a CUDA graph, as in conv2d_fp16.py, and is
compared with a convolution in float32.

Needs a CUDA device and PyTorch. Trials count across runs with one folder --dbs. --out is written after every layer.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
from convolutions import fastest_by_template, square

import schedsearch
from schedsearch.errors import NoValidConfigError, SchedsearchError
from schedsearch.target import Target
from schedsearch.template import load_templates

# n, h, w, c, k, kernel, stride, padding
LAYERS = [
    (1, 28, 28, 58, 58, 1, 1, 0),  # ShuffleNetV2
    (64, 28, 28, 58, 58, 1, 1, 0),
    (1, 14, 14, 116, 116, 1, 1, 0),
    (32, 14, 14, 116, 116, 1, 1, 0),
    (1, 112, 112, 24, 58, 1, 1, 0),
    (1, 256, 256, 6, 20, 5, 1, 2),
    (1, 80, 80, 256, 255, 1, 1, 0),  # YOLOv3 and v5
    (16, 20, 20, 512, 255, 1, 1, 0),
    (1, 56, 56, 36, 36, 3, 1, 1),
    (16, 56, 56, 50, 50, 3, 1, 1),
    (8, 52, 52, 128, 75, 3, 1, 1),
    (1, 128, 128, 30, 30, 3, 1, 1),
    (8, 96, 96, 17, 17, 3, 1, 1),
    (8, 56, 56, 24, 58, 1, 1, 0),
    (4, 28, 28, 116, 58, 3, 2, 1),
    (64, 1, 1, 1024, 1001, 1, 1, 0),  # a classifier of MobileNet
]


def chosen(options: argparse.Namespace) -> list[schedsearch.Workload]:
    """The layers that the options select."""
    layers = {0: LAYERS, 1: LAYERS[: len(LAYERS) // 2], 2: LAYERS[len(LAYERS) // 2 :]}[options.half]
    epilogue = tuple(filter(None, options.epilogue.split(",")))
    found = [square(*layer).replace(epilogue=epilogue) for layer in layers]
    return [workload for workload in found if (options.layers or "") in workload.label]


def fitting(workloads: Sequence[schedsearch.Workload], names: Sequence[str], target: Target) -> dict[str, list[Any]]:
    """Template -> the workloads that it takes, of templates in `names`, or of all."""
    templates = load_templates()
    found: dict[str, list[Any]] = {}
    for workload in workloads:
        for template in templates.matching(workload, target):
            if not names or template.name in names:
                found.setdefault(template.name, []).append(workload)
    return found


def tuned(options: argparse.Namespace, by_template: dict[str, list[Any]], folder: Path) -> dict[str, Any]:
    """Searches each template by itself, in a database of its own. Returns seconds and trials by template."""
    facts: dict[str, Any] = {}
    for name, workloads in by_template.items():
        started = time.perf_counter()
        try:
            summary = schedsearch.tune(
                workloads, folder / f"{name}.db", target="cuda", trials=options.trials, time_s=options.time,
                templates=[name], seed=options.seed, tuner=options.tuner, progress=False,
            )  # fmt: skip
        except NoValidConfigError as error:
            facts[name] = {"error": str(error)}
            print(f"{name}: {error}", flush=True)
            continue
        trials = sum(task.new_trials for task in summary.tasks)
        facts[name] = {
            "tuning_s": round(time.perf_counter() - started, 1),
            "trials": trials,
            "defaults_us": {task.workload.label: task.default_ns and task.default_ns / 1e3 for task in summary.tasks},
            "invalid": {task.workload.label: task.why_invalid for task in summary.tasks if task.why_invalid},
        }
        print(f"{name}: {trials} trials of {len(workloads)} layers in {facts[name]['tuning_s']} s", flush=True)
    return facts


def peer_times(options: argparse.Namespace, workload: schedsearch.Workload, sets: int, row: dict[str, Any]) -> list[Any]:
    """Adds the times of PyTorch's ways to the row. Returns operands in NHWC."""
    import torch
    import torch_conv2d as peers

    operands: list[Any] = []
    for layout in ("NCHW", "NHWC"):
        operands.clear()
        torch.cuda.empty_cache()
        operands += [peers.operands(workload, layout) for _ in range(sets)]
        ways = dict(peers.ways(workload, layout))
        if options.compiled and not workload.epilogue:
            torch._dynamo.reset()
            ways[f"compiled_{layout.lower()}"] = torch.compile(functools.partial(peers.convolve, workload), dynamic=False)
        for name, way in ways.items():
            try:
                with peers.time_limit(peers.WAY_LIMIT_S):
                    row[f"{name}_us"] = common.cold_graph_us([functools.partial(way, *tensors) for tensors in operands])
            except Exception as error:  # torch.compile may raise anything; the other ways are still timed
                row.setdefault("failed", {})[name] = f"{type(error).__name__}: {error}"[:500]
    return operands


def compare(
    options: argparse.Namespace, workload: schedsearch.Workload, names: Sequence[str], folder: Path
) -> dict[str, Any]:
    """One row: the times of PyTorch's ways and of the best kernel of each template.

    `prepared_us` has the times without the steps that repack weights, of kernels that have such steps.
    """
    import torch
    import torch_conv2d as peers

    sets = common.sets_needed(workload.min_bytes, torch.cuda.get_device_properties(0).L2_cache_size)
    row: dict[str, Any] = {
        "workload": workload.label,
        "sets": sets,
        "search_us": {},
        "template_us": {},
        "prepared_us": {},
        "config": {},
    }
    operands = peer_times(options, workload, sets, row)
    cudnn = {name: us for name, us in row.items() if name.endswith(("_nchw_us", "_nhwc_us"))}
    row["peer"] = min(cudnn, key=lambda name: cudnn[name])
    row["cudnn_us"], row["cudnn_nhwc_us"] = cudnn[row["peer"]], min(us for name, us in cudnn.items() if "nhwc" in name)
    expected = peers.convolve(workload, *(tensor.float() for tensor in operands[0]))
    for name in names:
        db = str(folder / f"{name}.db")
        try:
            kernel = schedsearch.compile(workload, db, target="cuda", allow=("exact",))
        except SchedsearchError as error:
            row.setdefault("failed", {})[name] = f"{type(error).__name__}: {error}"[:500]
            continue
        row["search_us"] |= fastest_by_template(workload, db)
        steps = [kernel.bind(*tensors) for tensors in operands]
        row["template_us"][name] = common.cold_graph_us(steps)
        if kernel.constants:
            constants = [spec.name for spec in workload.signature if spec.constant]
            ready = [
                kernel.bind(x, **kernel.prepare(**dict(zip(constants, tensors, strict=True)))) for x, *tensors in operands
            ]
            row["prepared_us"][name] = common.cold_graph_us(ready)
        row["config"][name] = dict(kernel.config)
        row.setdefault("relative_error", {})[name] = peers.relative_error(steps[0](), expected)
    if row["template_us"]:
        row["template"] = min(row["template_us"], key=lambda name: row["template_us"][name])
        row["us"] = row["template_us"][row["template"]]
        row["ratio"] = row["cudnn_us"] / row["us"]
    return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Layers, cuDNN, our templates, and the ratio of cuDNN's faster layout to our fastest template."""
    names = sorted({name for row in rows for name in row.get("template_us", {})})
    lines = []
    for row in rows:
        if "ratio" not in row:
            lines.append((row["workload"], *[""] * len(names), "", "", str(row.get("error") or row.get("failed"))[:60]))
            continue
        times = (f"{row['template_us'][name]:.2f}" if name in row["template_us"] else "" for name in names)
        lines.append(
            (row["workload"], *times, f"{row['cudnn_nhwc_us']:.2f}", f"{row['cudnn_us']:.2f}", f"{row['ratio']:.2f}")
        )
    return common.table(("layer, us", *names, "cuDNN NHWC", "cuDNN", "ratio"), lines)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--half", type=int, choices=(0, 1, 2), default=0, help="only the first or the second 8 layers; 0: all"
    )
    parser.add_argument("--layers", help="only layers whose label contains this text")
    parser.add_argument("--templates", default="", help="names, with commas between them; default: all that fit")
    parser.add_argument("--epilogue", choices=("", "bias,relu"), default="", help="fused, on both sides")
    parser.add_argument("--trials", type=int, default=40, help="for each template and layer")
    parser.add_argument("--time", type=float, help="seconds for each template")
    parser.add_argument("--tuner", default="xgb")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--compiled", action="store_true", help="torch.compile is a further peer; takes seconds for each layer"
    )
    parser.add_argument("--dbs", help="folder of the databases; default: one that is removed at the end")
    parser.add_argument("--out", help="JSON file to write")
    return parser.parse_args(words)


def main() -> None:
    options = arguments()
    import torch

    from schedsearch.device.detect import detect

    torch.backends.cudnn.benchmark = True
    torch.set_grad_enabled(False)
    workloads = chosen(options)
    if not workloads:
        raise SystemExit(f"no layer's label contains {options.layers!r}; allowed: part of e.g. 'conv2d 1x28x28x58 k58 1x1'")
    names = [name for name in options.templates.split(",") if name]
    by_template = fitting(workloads, names, detect("cuda"))
    with tempfile.TemporaryDirectory() as own:
        folder = Path(options.dbs or own)
        folder.mkdir(parents=True, exist_ok=True)
        run = tuned(options, by_template, folder)
        rows: list[dict[str, Any]] = []
        for workload in workloads:
            try:
                row = compare(options, workload, [name for name in by_template if workload in by_template[name]], folder)
            except (SchedsearchError, RuntimeError, ValueError) as error:  # RuntimeError: torch's
                row = {"workload": workload.label, "error": f"{type(error).__name__}: {error}"}
            rows.append(row)
            mean = common.geometric_mean([each["ratio"] for each in rows if "ratio" in each])
            common.write(options.out, {"rows": rows, "geometric_mean_ratio": mean, "tuning": run})
    print(table(rows))
    print(f"geometric mean {mean:.3f} of cuDNN over {sum('ratio' in row for row in rows)} of {len(rows)} layers")


if __name__ == "__main__":
    main()
