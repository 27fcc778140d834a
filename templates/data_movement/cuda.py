"""The operators that only move data on NVIDIA GPUs: see docs/kernels/data_movement.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from schedsearch.config import Config
from schedsearch.launch import Grid, Pointer
from schedsearch.launch_rules import MAX_STEPS
from schedsearch.ops import Layout
from schedsearch.ops.data_movement import DataMovement
from schedsearch.ops.dtypes import dtype
from schedsearch.ops.layout_transform import LayoutTransform, LayoutTransformParams, sizes
from schedsearch.space import ConfigSpace, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.data_movement.move import Move
from schedsearch.templates.data_movement.mover import RENAMED, Mover
from schedsearch.templates.layout_transform.permutation import Permutation
from schedsearch.workload import Workload

LEAST_CAPABILITY = (5, 0)
OPS = ("transpose", "depth_to_space", "space_to_depth", "strided_slice", "concat", "pad", "layout_transform")
_EMPTY = Knob("threads", (32,), "threads of the block that has nothing to do")


class DataMovementCuda(Template):
    """Each box of a movement is a launch: vectors where neighbours stay neighbours, tiles through shared memory elsewhere.

    The configuration is that of the largest box. Other boxes take it if it is legal for them, and their default otherwise.
    """

    name = "data_movement_cuda"
    version = 3
    op = "transpose"
    kind = "cuda"
    renamed = RENAMED

    @property
    def ops(self) -> tuple[str, ...]:
        return OPS

    def validate(self, workload: Workload, target: Target) -> str | None:
        if problem := target.older_than(LEAST_CAPABILITY):
            return problem
        movers = _movers(workload, target)
        if len(movers) > MAX_STEPS:
            return f"y has {len(movers)} parts; allowed: up to {MAX_STEPS}, each of which is a launch"
        return next((problem for _, mover in movers if (problem := mover.problem())), None)

    def space(self, workload: Workload, target: Target) -> ConfigSpace:
        movers = _movers(workload, target)
        return _largest(movers).space() if movers else ConfigSpace((_EMPTY,))

    def default(self, workload: Workload, target: Target, space: ConfigSpace) -> Config:
        movers = _movers(workload, target)
        return _largest(movers).default() if movers else Config(threads=32)

    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        steps: list[KernelStep] = []
        alignments: dict[str, int] = {}
        for x, mover in _movers(workload, target):
            own = config if not mover.space().check(config) else mover.default()
            steps.append(mover.step(own, x=x, y="y"))
            for name, alignment in zip((x, "y"), mover.alignments(own)):
                alignments[name] = max(alignment, alignments.get(name, 1))
        if not steps:
            steps.append(KernelStep(_nothing, (Pointer("y"),), Grid(1), 32))
        return KernelSource("cuda", "native", tuple(steps), alignments=alignments)


def _movers(workload: Workload, target: Target) -> list[tuple[str, Mover]]:
    """The argument and the mover of each box."""
    definition = workload.definition
    if isinstance(definition, LayoutTransform):
        params = LayoutTransformParams.of(workload.params)
        source, to = Layout.parse(params.layout), Layout.parse(params.to)
        p = Permutation.of(source, to, sizes(params), dtype(params.dtype).nbytes)
        return [("x", Mover(Move.of_permutation(p), target))]
    assert isinstance(definition, DataMovement)
    movement = definition.movement(workload.params)
    nbytes = {spec.name: spec.nbytes for spec in workload.signature}
    found = []
    for box in movement.boxes:
        move = Move.of(box, movement.element_bytes, nbytes[box.x], workload.output.span_bytes, movement.fill)
        found.append((box.x, Mover(move, target)))
    return found


def _largest(movers: Sequence[tuple[str, Mover]]) -> Mover:
    """The mover whose knobs are the workload's."""
    moves = [mover for _, mover in movers]
    return max(moves, key=lambda mover: math.prod(factor.extent for factor in mover.move.factors) * mover.move.element_bytes)


def _nothing(y: Any) -> None:
    """Writes an empty y."""
