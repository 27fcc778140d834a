"""Programs of workloads whose sizes may be known only at run time: values, calls, and segments.

A *segment* is a run of calls whose sizes follow from what exists when the segment begins: extents, and the values of arrays
that earlier segments computed. One small kernel computes all sizes of a segment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from schedsearch.executable.ports import Size
from schedsearch.ops.dependence import ShapeFunction
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.size_steps import SizeStep, Words
from schedsearch.workload import Workload

__all__ = ["DynamicCall", "DynamicProgram", "DynamicValue", "Formula", "Numbers", "Segment", "Size", "axes_of_view"]


@dataclass(frozen=True)
class Formula:
    """(times * base + plus) // over.

    Attributes:
        base: name of a size, or another formula.
    """

    base: str | Formula
    times: int
    plus: int
    over: int

    def at(self, sizes: Mapping[str, int]) -> int:
        base = sizes[self.base] if isinstance(self.base, str) else self.base.at(sizes)
        return (self.times * base + self.plus) // self.over


@dataclass(frozen=True)
class DynamicValue:
    """An array of the graph.

    Attributes:
        shape: its bound; with `words` None its shape.
        words: where its extents are in the block of sizes.
        sizes: of an input: axis -> the size that the caller chooses.
        strided: whether all calls that use it take its strides, so that it may have exactly its extents in memory.
        counted: the kernel that makes it counts its extents.
        view_of: the value whose memory it has, whether or not a call makes it there; empty if it has memory of its own.
        fixed: where its extents are in the block of sizes if they never change, but a kernel reads them.
        known: its extents where they follow from those of the inputs.
        numbers: it is a row of integers that the kernel of sizes computes; its memory is `words` of the block of sizes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    words: Words | None = None
    sizes: Mapping[int, Size] = field(default_factory=dict)
    strided: bool = True
    counted: bool = False
    view_of: str = ""
    fixed: Words | None = None
    known: tuple[int | Formula, ...] | None = None
    numbers: bool = False

    @property
    def nbytes(self) -> int:
        return self.bytes_of(self.shape)

    @property
    def is_visible(self) -> bool:
        """Whether it has memory of its own, and extents that follow from those of the inputs."""
        return not self.view_of and not self.numbers and (self.known is not None or self.words is None)

    def bytes_of(self, extents: Sequence[int]) -> int:
        size = dtype_of(self.dtype).nbytes
        for extent in extents:
            size *= extent
        return size


@dataclass(frozen=True)
class Shown:
    """Where the numbers of a model's value are.

    Attributes:
        name: of the graph's value.
        order: for each axis of the model's value the axis of the array.
    """

    name: str
    order: tuple[int, ...]


@dataclass(frozen=True)
class DynamicCall:
    """A workload on values: argument -> value, output -> value.

    Attributes:
        shape_functions: output -> its shape function: the operator's own, or that of its rows.
        scalars: call-time scalars whose values are not the defaults.
        source: what it stands for, such as "node pick (Gather)"; "" if the graph does not say.
    """

    name: str
    workload: Workload
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    shape_functions: Mapping[str, ShapeFunction]
    scalars: Mapping[str, float] = field(default_factory=dict)
    source: str = ""

    @property
    def what(self) -> str:
        """The call in messages."""
        return self.source or f"{self.name} ({self.workload.op})"


@dataclass(frozen=True)
class Numbers:
    """A row of integers that shapes are made of: `function` computes it where the extents are, without a call.

    Attributes:
        inputs: parameter of the function -> value.
    """

    name: str
    function: ShapeFunction
    inputs: Mapping[str, str]


@dataclass(frozen=True)
class Segment:
    """Attributes:
    steps: what its kernel of sizes computes, none if there is nothing to compute.
    values: for each step the name of the value.
    fetched: the words that the host reads before it can launch the calls in an exact run, if any.
    """

    calls: tuple[DynamicCall, ...]
    steps: tuple[SizeStep, ...]
    values: tuple[str, ...]
    fetched: Words | None


@dataclass(frozen=True)
class DynamicProgram:
    """Attributes:
    words: of the block of sizes. The first are the statuses of the segments in bounded runs.
    fixed: words with extents that never change.
    last: counted extents of outputs that the host reads at the end of an exact run.
    constants: value -> its numbers.
    called: names of the outputs for people.
    shows: value of the model that the graph was made from -> where its numbers are.
    """

    values: Mapping[str, DynamicValue]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    segments: tuple[Segment, ...]
    words: int
    fixed: tuple[tuple[Words, tuple[int, ...]], ...]
    last: Words | None
    constants: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    called: tuple[str, ...] = ()
    shows: Mapping[str, Shown] = field(default_factory=dict)


def axes_of_view(bound: Sequence[int], shape: Sequence[int], unknown: Sequence[bool]) -> tuple[int, ...] | None:
    """For each axis of a view the axis of the array that it is, or -1; None if an unknown extent would not be an axis."""
    if not any(unknown[1:]) and shape[:1] == bound[:1]:
        return (0, *(-1,) * (len(shape) - 1))
    kept = [axis for axis, extent in enumerate(bound) if extent != 1]
    if [bound[axis] for axis in kept] != [extent for extent in shape if extent != 1]:
        return None
    if any(open_ and extent == 1 for open_, extent in zip(unknown, bound)):
        return None
    left = iter(kept)
    return tuple(next(left) if extent != 1 else -1 for extent in shape)
