"""Gathers, scatters, topk, nonzero, nms and roi_align against PyTorch and torchvision, in one run.

    python benchmarks/dynamic_ops.py                    the defaults, without tuning
    python benchmarks/dynamic_ops.py --only topk --out topk.json

Needs a CUDA device, PyTorch and torchvision. Ours is timed cold in a CUDA graph: all operands rotate over sets that together
exceed 2.5x L2, and sizes that depend on the numbers stay on the device. PyTorch is timed likewise where it can be captured.
nonzero and nms of PyTorch need the host, so they are timed by events around calls one after the other, with their
synchronisations; the column `host` marks them. Results are compared with PyTorch's in float32: torchvision's roi_align has
coordinates of the image's type. --out is written after every case.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import common

import schedsearch

HEADER = ("case", "us", "PyTorch us", "host", "times as fast")
_REPEATS = 20


@dataclass(frozen=True)
class Case:
    """Attributes:
    arrays: (generator of random numbers) -> the workload's arguments as tensors.
    call: PyTorch's function of the same tensors.
    result: (our outputs) -> what corresponds to PyTorch's result.
    on_host: PyTorch's function waits for the host.
    """

    workload: schedsearch.Workload
    arrays: Callable[[Any], list[Any]]
    call: Callable[..., Any]
    result: Callable[[Any], Any] = lambda found: found
    on_host: bool = False


def cases() -> list[Case]:
    import torch
    from torchvision import ops

    def whole(high: int, *shape: int) -> Callable[[Any], Any]:
        return lambda rng: torch.randint(0, high, shape, device="cuda", generator=rng)

    def normal(dtype: Any, *shape: int) -> Callable[[Any], Any]:
        return lambda rng: torch.randn(shape, device="cuda", generator=rng).to(dtype)

    def every(*makers: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
        return lambda rng: [make(rng) for make in makers]

    def boxes(rng: Any, count: int, most: float) -> Any:
        corner = torch.rand((count, 2), device="cuda", generator=rng) * most
        size = torch.rand((count, 2), device="cuda", generator=rng) * (most / 5) + 1
        return torch.cat([corner, corner + size], 1)

    def candidates(classes: int, count: int) -> Callable[[Any], list[Any]]:
        return lambda rng: [
            boxes(rng, count, 1000.0)[None],
            torch.rand((1, classes, count), device="cuda", generator=rng),
        ]

    def suppress(threshold: float) -> Callable[..., Any]:
        def call(of_image: Any, scores: Any) -> Any:
            classes, count = scores.shape[1:]
            spread = of_image[0].repeat(classes, 1)
            labels = torch.arange(classes, device="cuda").repeat_interleave(count)
            kept = ops.batched_nms(spread, scores[0].reshape(-1), labels, threshold)
            return kept.sort().values  # by class, then by box

        return call

    def kept_boxes(count: int) -> Callable[[Any], Any]:
        def flat(found: Any) -> Any:
            y, extents = found
            rows = y[: int(extents[0])]
            return (rows[:, 1] * count + rows[:, 2]).sort().values

        return flat

    def regions(n_rois: int, side: float) -> Callable[[Any], Any]:
        return lambda rng: boxes(rng, n_rois, side * 0.8)

    half, single = torch.float16, torch.float32
    found = [
        Case(
            schedsearch.gather(x=(30000, 1024), indices=(16384,)),
            every(normal(half, 30000, 1024), whole(30000, 16384)),
            lambda x, i: torch.index_select(x, 0, i),
        ),
        Case(
            schedsearch.gather(x=(1000, 4096), indices=(1000, 4096), axis=1, by="elements", dtype="float32"),
            every(normal(single, 1000, 4096), whole(4096, 1000, 4096)),
            lambda x, i: torch.gather(x, 1, i),
        ),
        Case(
            schedsearch.scatter(x=(30000, 1024), indices=(16384, 1), by="tuples", reduction="add"),
            every(normal(single, 30000, 1024), whole(30000, 16384, 1), normal(single, 16384, 1024)),
            lambda x, i, u: torch.index_add(x, 0, i[:, 0], u),
        ),
        Case(
            schedsearch.scatter(x=(4096, 4096), indices=(4096, 512), axis=1, reduction="max"),
            every(normal(single, 4096, 4096), whole(4096, 4096, 512), normal(single, 4096, 512)),
            lambda x, i, u: torch.scatter_reduce(x, 1, i, u, "amax"),
        ),
    ]
    for shape, k in (((1, 200000), 1000), ((1, 242991), 2000), ((8, 16384), 1000), ((4096, 1000), 10), ((64, 50257), 50)):
        found.append(
            Case(
                schedsearch.topk(x=shape, k=k),
                every(normal(single, *shape)),
                lambda x, k=k: torch.topk(x, k, -1),
                lambda both: both[0],
            )
        )
    for shape in ((1000, 1000), (4096, 4096)):
        found.append(
            Case(
                schedsearch.nonzero(x=shape, dtype="uint8"),
                every(lambda rng, shape=shape: (torch.rand(shape, device="cuda", generator=rng) < 0.1).to(torch.uint8)),
                lambda x: torch.nonzero(x),
                lambda both: both[0][:, : int(both[1][1])].T,
                on_host=True,
            )
        )
    for classes, count in ((1, 1000), (1, 6000), (80, 1000)):
        found.append(
            Case(
                schedsearch.nms(n=1, classes=classes, boxes=count, max_output=count, iou_threshold=0.5),
                candidates(classes, count),
                suppress(0.5),
                kept_boxes(count),
                on_host=True,
            )
        )
    for layout in ("NHWC", "NCHW"):
        for n_rois, side_out, dtype in ((1000, 7, "float16"), (100, 14, "float16"), (1000, 7, "float32")):
            kind = getattr(torch, dtype)
            memory = torch.channels_last if layout == "NHWC" else torch.contiguous_format
            found.append(
                Case(
                    schedsearch.roi_align(
                        n=1, c=256, h=200, w=304, rois=n_rois, oh=side_out, ow=side_out, spatial_scale=0.25,
                        sampling_ratio=2, dtype=dtype, layout=layout,
                    ),
                    lambda rng, kind=kind, memory=memory, n_rois=n_rois: [
                        normal(kind, 1, 256, 200, 304)(rng).contiguous(memory_format=memory),
                        boxes(rng, n_rois, 640.0),
                        torch.zeros(n_rois, dtype=torch.int64, device="cuda"),
                    ],
                    lambda x, rois, batch, side_out=side_out: ops.roi_align(
                        x, torch.cat([batch[:, None].to(x.dtype), rois.to(x.dtype)], 1), side_out, 0.25, 2, True
                    ),
                )
            )  # fmt: skip
    return found


def events_us(calls: Sequence[Callable[[], object]]) -> float:
    """Microseconds of a call that waits for the host, from event to event; the median of calls in rotation."""
    import torch

    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for number in range(_REPEATS + 2):
        torch.cuda.synchronize()
        first.record()
        calls[number % len(calls)]()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last) * 1e3)
    return statistics.median(times[2:])


def compare(case: Case, l2_bytes: int, db: str, trials: int) -> dict[str, Any]:
    """Times of ours and of PyTorch. Raises AssertionError if the results differ."""
    import torch

    workload, rng = case.workload, torch.Generator("cuda").manual_seed(0)
    count = min(common.sets_needed(workload.min_bytes, l2_bytes), 64)
    sets = [case.arrays(rng) for _ in range(count)]
    kernel = schedsearch.compile(workload, db, target="cuda", allow=("exact",) if trials else ("default",))
    exact = [each.float() if each.is_floating_point() else each for each in sets[0]]
    wanted, found = case.call(*exact), case.result(kernel(*sets[0]))
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    assert found.shape == wanted.shape, f"{workload.label}: {list(found.shape)} results, PyTorch has {list(wanted.shape)}"
    error = float((found.double() - wanted.double()).abs().max()) / max(float(wanted.double().abs().max()), 1e-9)
    assert error < 2e-2, f"{workload.label}: wrong by {error:.2g} of the largest element"
    theirs = [lambda tensors=tensors: case.call(*tensors) for tensors in sets]
    return {
        "label": workload.label,
        "error": error,
        "config": dict(kernel.config),
        "us": common.cold_graph_us([kernel.bind(*tensors) for tensors in sets]),
        "torch_us": events_us(theirs) if case.on_host else common.cold_graph_us(theirs),
        "host": case.on_host,
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each case."""
    lines = [
        (
            row["label"], f"{row['us']:.2f}", f"{row['torch_us']:.2f}", "yes" if row["host"] else "",
            f"{row['torch_us'] / row['us']:.2f}",
        )
        for row in rows
    ]  # fmt: skip
    return common.table(HEADER, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose label contains this text")
    parser.add_argument("--trials", type=int, default=0, help="trials of a case; 0: the default configuration")
    parser.add_argument("--db", default="dynamic_ops.db", help="record database")
    parser.add_argument("--out", help="JSON file to write")
    options = parser.parse_args()
    import torch

    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    every = cases()
    chosen = [case for case in every if options.only in case.workload.label]
    if not chosen:
        parser.error(f"no case has {options.only!r} in its label: {'; '.join(case.workload.label for case in every)}")
    rows: list[dict[str, Any]] = []
    failed: list[dict[str, str]] = []
    for case in chosen:
        try:
            if options.trials:
                schedsearch.tune([case.workload], options.db, target="cuda", trials=options.trials)
            rows.append(compare(case, l2_bytes, options.db, options.trials))
            print(table(rows[-1:]).splitlines()[2], flush=True)
        except Exception as error:  # also PyTorch's, e.g. for want of memory; the other cases go on
            failed.append({"label": case.workload.label, "problem": f"{type(error).__name__}: {error}"})
            print(f"{case.workload.label}: {failed[-1]['problem']}", flush=True)
        common.write(options.out, {"rows": rows, "failed": failed})
        torch.cuda.empty_cache()
    print(table(rows))


if __name__ == "__main__":
    main()
