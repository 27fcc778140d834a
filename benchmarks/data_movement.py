"""The operators that only move data against a device-to-device copy of as many bytes, and PyTorch eager, in one run.

    python benchmarks/data_movement.py [--what targets|random|layouts] [--seed N] [--draws N] [--only TEXT]
                                       [--trials N] [--template NAME] [--time SECONDS] [--batch N] [--db FILE] [--out FILE]
                                       [--tuner NAME] [--restrict KNOB=VALUE[,VALUE]] [--knobs]

`targets` are large images with blocks of pixels and changes of layout, and slices of aligned rows. `random` draws shapes of
16 to 256 MB from the seed. `layouts` are changes of layout of common networks. Each shape is tuned first; `--trials 0` times
the defaults. `--knobs` prints the fastest time for each value of each knob among the trials, and writes all of them; with
`--tuner random --restrict store_bytes=16`, for example, it shows what a knob is worth. All times are microseconds with cold
operands in a CUDA graph. The copy moves half of the bytes that the operator reads and writes, so that its reads and writes
together are as many. Every result is compared bit for bit with PyTorch's views, or with `schedsearch.pack` where a layout
has blocks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import common
import numpy as np

import schedsearch

WHAT = ("targets", "random", "layouts")
LAYOUTS = (("NHWC", "NCHW"), ("NCHW", "NHWC"), ("NCHW", "NCHW32c"), ("NHWC", "NCHW32c"), ("NCHW32c", "NCHW"))
IMAGES = ((64, 56), (100, 56), (256, 28), (512, 7), (3, 224))  # channels, height and width
DTYPES = ("int8", "float16", "float32")
LARGE = ((128, 720, 1280), (64, 1440, 2560))  # channels, height and width of the image with many channels
MEGABYTES = (16, 256)  # of x, of random shapes
HEADER = ("movement", "us", "copy us", "share of a copy", "PyTorch us", "GB/s")


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="+", choices=WHAT, default=["targets", "random"], help="sets of shapes")
    parser.add_argument("--seed", type=int, default=0, help="of the random shapes")
    parser.add_argument("--draws", type=int, default=20, help="number of random shapes")
    parser.add_argument("--only", default="", help="only movements whose label contains this")
    parser.add_argument("--db", default="data_movement.db", help="record database")
    parser.add_argument("--trials", type=int, default=64, help="trials for each shape; 0: time the defaults")
    parser.add_argument("--template", help="tune with this template only; --trials 1 times its default")
    parser.add_argument("--time", type=float, help="seconds of tuning in all")
    parser.add_argument("--tuner", default="xgb", help="search strategy")
    parser.add_argument(
        "--restrict", action="append", default=[], metavar="KNOB=VALUES", help="try only these values of a knob"
    )
    parser.add_argument("--knobs", action="store_true", help="show the trials by the values of their knobs")
    parser.add_argument("--batch", type=int, default=128, help="images of the set layouts")
    parser.add_argument("--out", help="JSON file to write")
    options = parser.parse_args(words)
    for name, least in (("trials", 0), ("batch", 1), ("draws", 1), ("seed", 0)):
        if getattr(options, name) < least:
            parser.error(f"--{name} must be at least {least}, got {getattr(options, name)}")
    return options


def restrictions(words: Sequence[str]) -> dict[str, list[int | str]]:
    """knob -> values of 'knob=value,value'; digits are a number."""
    found = {}
    for word in words:
        knob, _, values = word.partition("=")
        if not values:
            raise SystemExit(f"--restrict {word}: give KNOB=VALUE[,VALUE]")
        found[knob] = [int(value) if value.isdigit() else value for value in values.split(",")]
    return found


def trials_of(workload: schedsearch.Workload, db: str) -> list[dict[str, Any]]:
    """The verified trials of a workload: template, configuration and microseconds, the fastest first."""
    from schedsearch.measurement import COLD_GRAPH, Outcome
    from schedsearch.records.store import Store

    with Store.open(db, create=False, readonly=True) as store:
        found = [
            {"template": record.template, "config": dict(record.config), "us": record.measurement.time_ns / 1e3}
            for record in store.rows(workload, mode=COLD_GRAPH, outcomes={Outcome.OK})
            if record.measurement.time_ns is not None
        ]
    return sorted(found, key=lambda trial: trial["us"])


def by_knob(trials: Sequence[dict[str, Any]]) -> dict[str, dict[Any, float]]:
    """knob -> value -> the fastest time of a trial that has it; the fastest value first."""
    found: dict[str, dict[Any, float]] = {}
    for trial in sorted(trials, key=lambda trial: trial["us"]):
        for knob, value in trial["config"].items():
            found.setdefault(knob, {}).setdefault(value, trial["us"])
    return found


def chosen(options: argparse.Namespace) -> list[schedsearch.Workload]:
    """The workloads of the sets that the options name."""
    found = []
    if "targets" in options.what:
        found += targets()
    if "random" in options.what:
        rng = np.random.default_rng(options.seed)
        found += [drawn(rng) for _ in range(options.draws)]
    if "layouts" in options.what:
        found += layouts(options.batch)
    return [workload for workload in dict.fromkeys(found) if options.only in workload.label]


def targets() -> list[schedsearch.Workload]:
    c, h, w = LARGE[0]
    found = [
        schedsearch.depth_to_space(n=1, c=channels, h=height, w=width, block=2, mode=mode, layout=layout)
        for channels, height, width in LARGE
        for layout in ("NCHW", "NHWC")
        for mode in ("DCR", "CRD")
    ]
    found += [
        schedsearch.layout_transform(n=1, c=c, h=h, w=w, layout=layout, to=to)
        for layout, to in (("NCHW", "NHWC"), ("NHWC", "NCHW"))
    ]
    found += [schedsearch.transpose(x=shape, permutation=(0, 2, 1)) for shape in ((1, c, h * w), (1, h * w, c))]
    found += [
        schedsearch.space_to_depth(n=1, c=c // 4, h=2 * h, w=2 * w, block=2, mode="CRD", layout=layout)
        for layout in ("NCHW", "NHWC")
    ]
    found.append(schedsearch.strided_slice(x=(c, h, 2 * w), begin=(0, 0, 64), end=(c, h, 64 + w)))
    return found


def layouts(batch: int) -> list[schedsearch.Workload]:
    return [
        schedsearch.layout_transform(n=batch, c=c, h=size, w=size, layout=layout, to=to, dtype=dtype)
        for dtype in DTYPES
        for layout, to in LAYOUTS
        for c, size in IMAGES
    ]


def drawn(rng: np.random.Generator) -> schedsearch.Workload:
    """A random workload whose x has 16 to 256 MB; half of the extents are even, and many are not."""
    while True:
        dtype = str(rng.choice(("float16", "float16", "int8", "float32")))
        workload = _DRAWS[rng.integers(len(_DRAWS))](rng, dtype)
        megabytes = workload.signature[0].nbytes / 1e6
        if MEGABYTES[0] <= megabytes <= MEGABYTES[1] and workload.output.nbytes / 1e6 >= MEGABYTES[0]:
            return workload


def _blocks(rng: np.random.Generator, dtype: str) -> schedsearch.Workload:
    block, (h, w) = int(rng.integers(2, 5)), (int(extent) for extent in rng.integers(32, 1500, 2))
    c = int(rng.integers(1, 65))
    how: dict[str, Any] = {"n": int(rng.integers(1, 9)), "block": block, "dtype": dtype}
    how |= {"mode": ("DCR", "CRD")[rng.integers(2)], "layout": ("NCHW", "NHWC")[rng.integers(2)]}
    if rng.integers(2):
        return schedsearch.depth_to_space(c=c * block**2, h=h, w=w, **how)
    return schedsearch.space_to_depth(c=c, h=h // block * block, w=w // block * block, **how)


def _permutation(rng: np.random.Generator, dtype: str) -> schedsearch.Workload:
    rank = int(rng.integers(2, 6))
    shape = [int(extent) for extent in np.exp(rng.uniform(0.7, 26 / rank * 0.8, rank)).astype(int)]
    order = [int(axis) for axis in rng.permutation(rank)]
    if order == sorted(order):
        order.reverse()
    return schedsearch.transpose(x=shape, permutation=order, dtype=dtype)


def _layout(rng: np.random.Generator, dtype: str) -> schedsearch.Workload:
    layout, to = (("NHWC", "NCHW"), ("NCHW", "NHWC"))[rng.integers(2)]
    n, c, h, w = (int(rng.integers(1, most)) for most in (65, 513, 400, 400))
    return schedsearch.layout_transform(n=n, c=c, h=h, w=w, layout=layout, to=to, dtype=dtype)


_DRAWS: tuple[Callable[[np.random.Generator, str], schedsearch.Workload], ...] = (_blocks, _blocks, _permutation, _layout)


def torch_way(workload: schedsearch.Workload) -> Callable[[Any], Any] | None:
    """What PyTorch does instead: it copies a view of x. None if x or y has a layout with blocks."""
    p = workload.params
    if workload.op == "transpose":
        return lambda x: x.permute(p["permutation"]).contiguous()
    if workload.op == "layout_transform":
        if not {workload.layout, workload.to} <= {"NCHW", "NHWC"}:
            return None
        order = [workload.layout.index(axis) for axis in workload.to]
        return lambda x: x.permute(order).contiguous()
    if workload.op == "strided_slice":
        where = tuple(slice(*each) for each in zip(p["begin"], p["end"], p["strides"]))
        return lambda x: x[where].contiguous()
    return _torch_blocks(workload)


def _torch_blocks(workload: schedsearch.Workload) -> Callable[[Any], Any]:
    """depth_to_space and space_to_depth by digits: n, c (of the image), h, w (of the blocks), i and j (in a block)."""
    p, block = workload.params, workload.params["block"]
    spread = workload.op == "space_to_depth"
    channels = p["c"] if spread else p["c"] // block**2
    down = block if spread else 1
    sizes = {"n": p["n"], "c": channels, "h": p["h"] // down, "w": p["w"] // down, "i": block, "j": block}
    inside = "ijc" if p["mode"] == "DCR" else "cij"
    deep = f"n{inside}hw" if p["layout"] == "NCHW" else f"nhw{inside}"
    flat = "nchiwj" if p["layout"] == "NCHW" else "nhiwjc"
    source, to = (flat, deep) if spread else (deep, flat)
    shape, order = [sizes[digit] for digit in source], [source.index(digit) for digit in to]
    return lambda x: x.view(shape).permute(order).contiguous()


def row_of(workload: schedsearch.Workload, us: float, copy_us: float, torch_us: float | None) -> dict[str, Any]:
    return {"label": workload.label, "nbytes": workload.min_bytes, "us": us, "copy_us": copy_us, "torch_us": torch_us}


def line_of(row: dict[str, Any]) -> tuple[object, ...]:
    return (
        row["label"],
        f"{row['us']:.1f}",
        f"{row['copy_us']:.1f}",
        f"{row['copy_us'] / row['us']:.0%}",
        "" if row["torch_us"] is None else f"{row['torch_us']:.1f}",
        f"{row['nbytes'] / row['us'] / 1e3:.0f}",
    )


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each movement, and the least and the mean share of a copy's speed."""
    shares = [row["copy_us"] / row["us"] for row in rows]
    lines = [line_of(row) for row in rows]
    lines.append(("geometric mean", "", "", f"{common.geometric_mean(shares):.0%}", "", ""))
    lines.append(("least", "", "", f"{min(shares):.0%}", "", ""))
    return common.table(HEADER, lines)


def compare(workload: schedsearch.Workload, options: argparse.Namespace, l2_bytes: int) -> dict[str, Any]:
    """Times of our kernel, of a copy and of PyTorch. Raises AssertionError if the kernel's result is wrong."""
    import torch

    spec, dtype = workload.signature[0], getattr(torch, workload.dtype)
    sets = common.sets_needed(workload.min_bytes, l2_bytes)
    xs = [torch.randint(-100, 100, spec.shape, dtype=torch.int8, device="cuda").to(dtype) for _ in range(sets)]
    kernel = schedsearch.compile(workload, options.db, target="cuda", allow=("exact",) if options.trials else ("default",))
    way = torch_way(workload)
    if way is None:
        plain = xs[0] if workload.layout == "NCHW" else schedsearch.unpack(xs[0], workload.layout, c=workload.c)
        expected = schedsearch.pack(plain, workload.to)
    else:
        expected = way(xs[0])
    assert torch.equal(kernel(xs[0]).flatten(), expected.flatten()), workload.label
    us = common.cold_graph_us([kernel.bind(x) for x in xs])
    torch_us = None if way is None else common.cold_graph_us([lambda x=x: way(x) for x in xs])
    row = row_of(workload, us, common.copy_us(workload.min_bytes, sets), torch_us)
    return {**row, "template": kernel.provenance.template, "config": dict(kernel.config)}


def main() -> None:
    options = arguments()
    import torch

    workloads = chosen(options)
    if options.trials:
        only = [options.template] if options.template else None
        restrict = restrictions(options.restrict)
        tasks = [schedsearch.Task(workload, restrict=restrict) for workload in workloads]
        schedsearch.tune(
            tasks, options.db, target="cuda", trials=options.trials, time_s=options.time, templates=only, tuner=options.tuner
        )
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    rows = []
    for workload in workloads:
        rows.append(compare(workload, options, l2_bytes))
        print("  ".join(map(str, line_of(rows[-1]))), flush=True)
        if options.knobs and options.trials:
            rows[-1]["trials"] = trials_of(workload, options.db)
            for knob, values in by_knob(rows[-1]["trials"]).items():
                print(f"  {knob}:", ", ".join(f"{value} {us:.1f}" for value, us in values.items()))
        common.write(options.out, {"rows": rows, "trials": options.trials, "seed": options.seed})
        torch.cuda.empty_cache()
    print(table(rows))


if __name__ == "__main__":
    main()
