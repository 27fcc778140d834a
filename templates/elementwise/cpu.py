"""elementwise on CPUs: see docs/kernels/bandwidth.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from schedsearch.backend.cpu_moves import read_op, write_op
from schedsearch.backend.cpu_ops import round_to_even, rounded_product, unknown
from schedsearch.config import Config
from schedsearch.launch import Grid, Pointer
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.elementwise import ElementwiseParams, reads_of, typed_of
from schedsearch.ops.expression_types import is_whole, stored
from schedsearch.space import ConfigSpace, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.elementwise.broadcast import Spread
from schedsearch.templates.elementwise.float32_functions import nearest
from schedsearch.templates.elementwise.programs import program
from schedsearch.templates.parts import cpu_functions
from schedsearch.templates.parts.casts import f32, i64
from schedsearch.templates.parts.cpu_elements import element_type, narrowed, widened
from schedsearch.templates.parts.cpu_threads import busy_threads, threads_knob
from schedsearch.templates.parts.slices import place_of
from schedsearch.workload import Workload

_PIECES = (1024, 4096, 16384)
_MAX_ITEMS = 2**31 - 1
_SHORT = 32  # LLVM takes loops of fewer elements apart, and makes worse vectors of what is left


class ElementwiseCpu(Template[ElementwiseParams]):
    """A work item is a piece of y along which every input has equal steps."""

    name = "elementwise_cpu"
    version = 2
    op = "elementwise"
    kind = "cpu"

    def validate(self, workload: Workload[ElementwiseParams], target: Target) -> str | None:
        items = _items(workload, _PIECES[-1])
        return None if items <= _MAX_ITEMS else f"y has {items} parts; allowed: less than 2**31"

    def space(self, workload: Workload[ElementwiseParams], target: Target) -> ConfigSpace:
        pieces = tuple(n for n in _PIECES if _items(workload, n) <= _MAX_ITEMS)
        return ConfigSpace(
            (
                Knob("piece", pieces, "elements of a work item, at most"),
                threads_knob(target),
            )
        )

    def default(self, workload: Workload[ElementwiseParams], target: Target, space: ConfigSpace) -> Config:
        """The numbers of a work item stay in the first-level cache. As many threads as have enough to do."""
        values = space.values
        piece = values["piece"][min(1, len(values["piece"]) - 1)]
        return Config(piece=piece, threads=busy_threads(workload, target, values["threads"]))

    def kernel(self, workload: Workload[ElementwiseParams], target: Target, config: Config) -> KernelSource:
        params = (Pointer("y"), *(Pointer(spec.name) for spec in workload.signature))
        items = _items(workload, config["piece"])
        step = KernelStep(elementwise_kernel(workload, config["piece"]), params, Grid(items), min(config["threads"], items))
        return KernelSource("cpu", "native", (step,))


def elementwise_kernel(workload: Workload[ElementwiseParams], piece: int) -> Callable[..., None]:
    """The kernel (y, *inputs, start, stop) over pieces of runs."""
    p = workload.params
    run, place = _run(workload), place_of(workload.output)
    found = typed_of(p)
    whole = is_whole(p.out_dtype) or (found.whole and not dtype_of(p.out_dtype).is_float)
    pieces, element = -(-run // piece), element_type(p.out_dtype)
    narrow = _shortened(element) if whole else narrowed(p.out_dtype)
    functions = {**nearest(_nearest_whole, rounded_product), **cpu_functions.FUNCTIONS}
    compute = program(stored(found, p.out_dtype), [spec.name for spec in workload.signature], functions)
    count: Callable[[Any], Any] = unknown if run < _SHORT else i64
    # y may be the memory of an input, but then every element is read before it is written.
    write = write_op(element)
    fetch: Callable[..., Any] = _no_numbers
    places: Callable[..., Any] = _no_places
    for slot, (spec, read) in enumerate(zip(workload.signature, reads_of(p))):
        spread = Spread.of(read, p.y)
        places = _then_place(places, spread.offset(i64))
        fetch = _then_number(fetch, slot, element_type(spec.dtype), _widened(spec.dtype), spread.step)

    def apply(y: Any, *arrays: Any, start: Any, stop: Any) -> None:
        for item in range(start, stop):
            inside = item % pieces * piece
            first = item // pieces * run + inside
            at, to = places(first), place(first)
            for i in range(count(min(piece, run - inside))):
                write(y, to + i, narrow(compute(fetch(arrays, at, i))))

    return apply


def _widened(dtype: str) -> Callable[[Any], Any]:
    return i64 if is_whole(dtype) else widened(dtype)


def _shortened(element: Any) -> Callable[[Any], Any]:
    def shortened(value: Any) -> Any:
        return element(value)

    return shortened


def _nearest_whole(x: Any) -> Any:
    return round_to_even(f32(x))


def _no_numbers(arrays: Any, at: Any, i: Any) -> Any:
    return ()


def _then_number(before: Any, slot: int, element: Any, widen: Any, step: int) -> Callable[..., Any]:
    read = read_op(element)

    def numbers(arrays: Any, at: Any, i: Any) -> Any:
        return before(arrays, at, i) + (widen(read(arrays[slot], at[slot] + i * step)),)  # noqa: RUF005 - Numba knows no *

    return numbers


def _no_places(place: Any) -> Any:
    return ()


def _then_place(before: Any, offset: Any) -> Callable[[Any], Any]:
    def places(place: Any) -> Any:
        return before(place) + (i64(offset(place)),)  # noqa: RUF005 - Numba knows no *

    return places


def _run(p: Workload[ElementwiseParams]) -> int:
    """Elements of y, neighbours in memory, along which every input has equal steps."""
    return min(p.output.runs[0], *(Spread.of(read, p.params.y).inner for read in reads_of(p.params)))


def _items(p: Workload[ElementwiseParams], piece: int) -> int:
    run = _run(p)
    return p.output.size // run * -(-run // piece)
