"""unique on NVIDIA GPUs: see docs/kernels/selection.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from schedsearch.config import Config
from schedsearch.launch import Grid, NumbaArray
from schedsearch.ops.unique import UniqueParams, sliced
from schedsearch.space import ConfigSpace, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.selection import unique_kernels as kernels
from schedsearch.templates.selection.block import next_power
from schedsearch.templates.selection.keys import words_of
from schedsearch.templates.selection.unique_kernels import THREADS, TILE
from schedsearch.workload import Workload

MOST = 1 << 19  # elements or slices: a plan has up to 64 steps
PARTS = (64, 128, 256, 512)


class UniqueCuda(Template[UniqueParams]):
    """Sorts the places of elements or slices, and numbers those that differ from the one before."""

    name = "unique_cuda"
    version = 1
    op = "unique"
    kind = "cuda"

    def validate(self, workload: Workload[UniqueParams], target: Target) -> str | None:
        _, count, _ = sliced(workload.params)
        return None if count <= MOST else f"x has {count} elements or slices to compare; allowed: up to {MOST}"

    def space(self, workload: Workload[UniqueParams], target: Target) -> ConfigSpace:
        return ConfigSpace((Knob("parts", PARTS, "blocks that number what differs, at most"),))

    def default(self, workload: Workload[UniqueParams], target: Target, space: ConfigSpace) -> Config:
        return Config(parts=256)

    def kernel(self, workload: Workload[UniqueParams], target: Target, config: Config) -> KernelSource:
        _, count, _ = sliced(workload.params)
        size = next_power(count)
        part = -(-count // (config["parts"] * THREADS)) * THREADS
        blocks = -(-count // part)
        arrays = arrays_of(workload)
        lengths = {"order": size, "marks": count, "numbers": count, "ranks": count, "starts": count, "counted": blocks}
        spaces = {name: NumbaArray(name, "int32", (n,), (4,)) for name, n in lengths.items()}
        keys = NumbaArray("keys", "int64", (size,), (8,))
        x, order, marks, numbers, ranks = (
            arrays["x"], spaces["order"], spaces["marks"], spaces["numbers"], spaces["ranks"]
        )  # fmt: skip

        def over(items: int, function: Callable[..., Any], *params: NumbaArray) -> KernelStep:
            return KernelStep(function, params, Grid(-(-items // THREADS)), THREADS)

        def numbered(to: NumbaArray) -> list[KernelStep]:
            counted = spaces["counted"]
            return [
                KernelStep(kernels.count_kernel(count, part), (marks, counted), Grid(blocks), THREADS),
                KernelStep(kernels.number_kernel(count, part), (marks, counted, to), Grid(blocks), THREADS),
            ]

        steps = [over(size, kernels.begin_kernel(workload, size), x, keys, order), *_sorting(workload, size, x, keys, order)]
        steps += [over(count, kernels.heads_kernel(workload), x, order, marks), *numbered(numbers)]
        if workload.params.order == "first":
            steps.append(over(count, kernels.clear_kernel(count), marks))
            steps.append(over(count, kernels.first_kernel(count), order, numbers, marks))
            steps += numbered(ranks)
        written = (
            x, order, numbers, ranks, arrays["y"], arrays["indices"], arrays["inverse"], arrays["y_extents"],
            arrays["indices_extents"], arrays["counts_extents"], spaces["starts"],
        )  # fmt: skip
        steps.append(over(count, kernels.write_kernel(workload), *written))
        finished = order, numbers, ranks, spaces["starts"], arrays["inverse"], arrays["counts"]
        steps.append(over(count, kernels.finish_kernel(workload), *finished))
        workspaces = {name: 4 * n for name, n in lengths.items()} | {"keys": 8 * size}
        return KernelSource("cuda", "native", tuple(steps), workspaces)


def arrays_of(workload: Workload[UniqueParams]) -> dict[str, NumbaArray]:
    """x and y as the bits of their elements, and the other outputs."""
    found = {name: words_of(name, workload.params.dtype, _size(workload, name)) for name in ("x", "y")}
    for spec in workload.outputs[1:]:
        found[spec.name] = NumbaArray(spec.name, "int64", (spec.size,), (8,))
    return found


def _size(workload: Workload[UniqueParams], name: str) -> int:
    return next(spec.size for spec in (*workload.signature, *workload.outputs) if spec.name == name)


def _sorting(workload: Workload[UniqueParams], size: int, *arrays: NumbaArray) -> list[KernelStep]:
    """The bitonic network: whole tiles first, then run after run."""
    tile, steps = min(size, TILE), []

    def in_tiles(first_run: int, last_run: int) -> KernelStep:
        function = kernels.tile_kernel(workload, size, first_run, last_run)
        return KernelStep(function, arrays, Grid(size // tile), THREADS)

    steps.append(in_tiles(2, tile))
    run = 2 * tile
    while run <= size:
        stride = run // 2
        while stride >= tile:
            function = kernels.far_kernel(workload, size, run, stride)
            steps.append(KernelStep(function, arrays, Grid(-(-size // 2 // THREADS)), THREADS))
            stride //= 2
        steps.append(in_tiles(run, run))
        run *= 2
    return steps
