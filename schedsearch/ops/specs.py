"""What an operator takes and makes: arrays and scalars with their roles, and the amount of work."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from schedsearch.ops.dtypes import dtype as dtype_of

Role = Literal["factor", "addend", "scale", "index", "data"]


@dataclass(frozen=True)
class ArgSpec:
    """One array argument or output.

    Attributes:
        shape: of the array in memory, which is contiguous unless it is a slice.
        axes: names its dimensions, as a layout (NHWC, OHWI, NCHW32c) or one capital letter each (K).
        role: decides how generic code draws numbers to check and time kernels with. The product of all `factor`s is summed
            over the reduction; an `addend` is added to the sum; a `scale` multiplies it; an `index` is an integer;
            `data` is copied, compared or passed to some other function.
        constant: its values do not change between calls (weights), so that kernels may prepare it once.
        aliases: name of the output that may share its memory (a residual that is updated in place).
        below: an `index` is in [0, below).
        roundings: of an integer output that kernels round from a float32: how many roundings to float32 may come before. The
            truth is then that number, limited to the output's format but not rounded (float64), and a kernel may differ
            from the nearest integer only where so many roundoff errors reach the next one. 0: the output is exact.
        positive: its float32 numbers are scales of quantised numbers, finite and above zero. Calls on a CPU refuse others.
        undecided: elements whose truth is undefined are not compared: roundoff of float32 decides about them, as about
            `a * b < c` where both sides are nearly equal.
        extents: name of the int64 array that holds the extents at run time; "": they are those of `shape`. Otherwise `shape`
            is the upper bound, whose strides the array has in memory, and elements beyond the extents are undefined.
        slice_of: shape of a larger contiguous array of which this output is a slice along one axis, or () if it is an array
            of its own. Its address is that of the slice's first element. Kernels leave the rest of the larger array alone.
        part: (first, count, of): of every `of` neighbouring elements of this argument, kernels read `count` from `first` on;
            (): they may read all.

    Raises:
        ValueError: an index without `below`, or an array that is not a slice of `slice_of` along one axis.
    """

    name: str
    axes: str
    shape: tuple[int, ...]
    dtype: str
    role: Role = "data"
    constant: bool = False
    aliases: str | None = None
    below: int | None = None
    roundings: int = 0
    positive: bool = False
    slice_of: tuple[int, ...] = ()
    extents: str = ""
    undecided: bool = False
    part: tuple[int, ...] = ()

    @property
    def partial(self) -> bool:
        """Whether some elements may have no truth."""
        return bool(self.extents) or self.undecided

    def __post_init__(self) -> None:
        if self.role == "index" and (self.below is None or self.below < 1):
            raise ValueError(f"argument {self.name!r} is an index and needs below=1 or more; got below={self.below}")
        if self.slice_of:
            extents = list(zip(self.shape, self.slice_of))
            if (
                len(self.slice_of) != len(self.shape)
                or sum(n != whole for n, whole in extents) > 1
                or self.size > self.whole
            ):
                raise ValueError(f"{self.name!r} of shape {self.shape} is not a slice of {self.slice_of} along one axis")

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.size * dtype_of(self.dtype).nbytes

    @property
    def whole(self) -> int:
        """Number of elements of the array that it is a slice of, or its own."""
        return math.prod(self.slice_of or self.shape)

    @property
    def runs(self) -> tuple[int, int]:
        """(elements of a run of neighbours in memory, elements from the start of a run to the next); a slice has several."""
        for axis, (own, whole) in enumerate(zip(self.shape, self.slice_of)):
            if own != whole:
                return math.prod(self.shape[axis:]), math.prod(self.slice_of[axis:])
        return self.size, self.size

    @property
    def span_bytes(self) -> int:
        """Bytes from the first element to the end of the last one; more than `nbytes` if it is a slice."""
        if not self.size:
            return 0
        run, step = self.runs
        return (self.size // run * step - (step - run)) * dtype_of(self.dtype).nbytes

    def place(self, flat: int) -> int:
        """Elements in memory from the first one to the one with this flat index."""
        run, step = self.runs
        return flat // run * step + flat % run

    def strides(self, order: str) -> tuple[int, ...]:
        """Elements between neighbours along each axis in `order`.

        Example:
            >>> ArgSpec("x", "NHWC", (1, 5, 7, 3), "float32").strides("NCHW")
            (105, 1, 21, 3)

        Raises:
            ValueError: the array's layout has blocks, such as NCHW32c.
        """
        if len(self.axes) != len(self.shape):
            raise ValueError(f"{self.name!r} has the layout {self.axes}; strides along an axis need a layout without blocks")
        extents = self.slice_of or self.shape
        return tuple(math.prod(extents[self.axes.index(axis) + 1 :]) for axis in order)


@dataclass(frozen=True)
class ScalarSpec:
    """A number that is given at call time.

    Attributes:
        dtype: its format, a key of `schedsearch.ops.dtypes.SCALAR_FORMATS`.
        number: integer format that the value must belong to, as a zero point does; "": any float32.
        positive: it is the scale of quantised numbers, finite and above zero. Calls refuse others.
    """

    name: str
    default: float
    number: str = ""
    dtype: str = "float32"
    positive: bool = False


@dataclass(frozen=True)
class Work:
    """The amount of work.

    Attributes:
        flops: two per multiply-add of the definition, including padding but not the epilogue; 0 if arithmetic does not
            matter. Speed is then shown in GB/s.
        nbytes: bytes of every argument read once and every output written once.
        reduction: products (or addends) summed into one output element; 1 if nothing is summed.
        least_flops: operations that no algorithm avoids; 0 if it is not known. A time that would need more than a device's
            peak for them is refused: see `schedsearch.roofline`.
        least_bytes: bytes that every kernel must read or write; 0 if it is not known. Outputs always count.
    """

    flops: int
    nbytes: int
    reduction: int = 1
    least_flops: int = 0
    least_bytes: int = 0
