"""Which extents of a graph's arrays are known, and which are the same though nobody knows them.

An extent is an integer or an `Unknown`, and `same` compares two. Shape functions are called with these: one that hands an
extent on is traced to where it comes from; one that computes with it makes another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from schedsearch.dynamic import numbers
from schedsearch.dynamic.follow import FOLLOWS, Along, Follows
from schedsearch.errors import UsageError
from schedsearch.ops.bounded import DYNAMIC
from schedsearch.ops.dependence import EXTENTS, Dependence, ShapeFunction
from schedsearch.ops.elementwise import ElementwiseParams, reads_of
from schedsearch.workload import Workload

ELEMENTWISE = "elementwise"
_NAMES = ("x", "x0")  # arguments whose extents those of an output may follow
_COUNTED_AXIS = {"nms": 0, "nonzero": 1}  # the only axis whose extent the kernel counts


class Unknown:
    """An extent that is known at run time only. It cannot be compared, so that nobody decides by it; `same` says whether two
    extents are the same, whatever they turn out to be.

    Sums of the same ones are the same. So is what integers make of the same one, as 2 * h or (h - 1) // 2 + 1:
    (times * base + plus) // over.

    Attributes:
        is_extent: it is at least 0.
        chosen: it follows from a size that the caller chooses, so that the host knows it.
        base: what it is computed from; itself if it is not.
        line: (times, plus, over), in lowest terms.
        terms: what it is the sum of; itself if it is none.
    """

    def __init__(
        self,
        name: str,
        is_extent: bool = True,
        terms: Sequence[Unknown] = (),
        *,
        chosen: bool = False,
        base: Unknown | None = None,
        line: tuple[int, int, int] = (1, 0, 1),
    ) -> None:
        self.name, self.is_extent, self.chosen = name, is_extent, chosen
        self.base, self.line, self.terms = self if base is None else base, line, tuple(terms) or (self,)
        # what it is computed from lives as long, so that its id is its own
        self._key: object = id(self) if base is None else (base._key, line)
        if terms:
            self._key = tuple(sorted((each._key for each in terms), key=str))

    def __add__(self, other: object) -> Unknown:
        if isinstance(other, Unknown):
            terms = (*self.terms, *other.terms)
            name, chosen = " + ".join(sorted(each.name for each in terms)), self.chosen and other.chosen
            return Unknown(name, self.is_extent and other.is_extent, terms, chosen=chosen)
        if type(other) is not int:
            return NotImplemented
        times, plus, over = self.line
        return self.base._at(times, plus + other * over, over)

    __radd__ = __add__

    def __sub__(self, other: object) -> Unknown:
        return self + -other if type(other) is int else NotImplemented

    def __mul__(self, other: object) -> Unknown | int:
        if type(other) is not int:
            return NotImplemented
        times, plus, over = self.line
        if not other:
            return 0
        return self.base._at(times * other, plus * other, 1) if over == 1 else self._at(other, 0, 1)

    __rmul__ = __mul__

    def __floordiv__(self, other: object) -> Unknown:
        if type(other) is not int or other < 1:
            return NotImplemented
        times, plus, over = self.line
        return self.base._at(times, plus, over * other)

    def _at(self, times: int, plus: int, over: int) -> Unknown:
        """(times * self + plus) // over, in lowest terms."""
        common = math.gcd(times, over)
        times, plus, over = times // common, plus // common, over // common
        if (times, plus, over) == (1, 0, 1):
            return self
        name = f"{times} * {self.name}" if times != 1 else self.name
        name = f"({name} {'-' if plus < 0 else '+'} {abs(plus)})" if plus else name
        name = f"{name} // {over}" if over != 1 else name
        is_extent = self.is_extent and times > 0 and plus >= 0
        return Unknown(name, is_extent, chosen=self.chosen, base=self, line=(times, plus, over))

    def __bool__(self) -> bool:
        raise TypeError(f"{self.name} is known at run time only")

    def __eq__(self, other: object) -> bool:
        raise TypeError(f"{self.name} is known at run time only")

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return self.name


def same(one: object, other: object) -> bool:
    """Whether two extents are the same in every run: equal integers, or the same of what is known at run time only."""
    if isinstance(one, Unknown) and isinstance(other, Unknown):
        return one._key == other._key
    return not isinstance(one, Unknown) and not isinstance(other, Unknown) and one == other


Dim = int | Unknown
Dims = Mapping[str, Sequence[Dim]]  # argument -> its extents


class Meeting(NamedTuple):
    """Extents of two arguments that a run has to compare: the sizes that a caller chooses decide whether they agree.

    Attributes:
        axes: axis of `one`, and what has to be the extent of `other`.
    """

    one: str
    other: str
    axes: tuple[tuple[int, Along], ...]


def same_dims(call: str, workload: Workload, dims: Dims, meetings: list[Meeting]) -> str | None:
    """The argument whose extents, some unknown, are those of the output of an elementwise call.

    Args:
        meetings: takes what is to be compared at run time.

    Raises:
        UsageError: arguments may have different extents, whatever sizes a caller chooses.
    """
    unknown = [argument for argument in dims if _unknown(dims[argument])]
    if workload.op != ELEMENTWISE or not unknown:
        return None
    reads = reads_of(ElementwiseParams.of(workload.params))
    shapes = {each.name: each.shape for each in reads}
    dims = {**dims, **{each.name: each.shape for each in reads if each.slice_of and each.name not in unknown}}
    first = next((each for each in unknown if shapes[each] == workload.outputs[0].shape), unknown[0])
    cut = any(each.slice_of for each in reads if each.name in unknown)
    if cut or shapes[first] != workload.outputs[0].shape:
        raise _fixed(call, workload, first, dims)
    rank = len(shapes[first])
    for argument in dims:
        skipped = rank - len(shapes[argument])
        apart = [
            (skipped + axis, Along(axis))
            for axis, (one, other) in enumerate(zip(dims[first][skipped:], dims[argument]))
            if shapes[argument][axis] != 1 and _unknown((one, other)) and not same(one, other)
        ]
        if apart and not _chosen(dims[first], dims[argument]):
            raise UsageError(
                f"{call} reads {first} of {list(dims[first])} and {argument} of {list(dims[argument])}; "
                "their extents may differ"
            )
        if apart:
            meetings.append(Meeting(first, argument, tuple(apart)))
    return first


def followed(call: str, workload: Workload, dims: Dims, meetings: list[Meeting]) -> ShapeFunction | None:
    """The shape function of the output of a call that has none, but gets arrays of unknown extents.

    Args:
        meetings: takes what is to be compared at run time.

    Raises:
        UsageError: the call cannot take such an array.
    """
    if workload.op in _LOOK_UPS:
        return _looked_up(call, workload, dims)
    arguments = [argument.name for argument in workload.signature]
    taken = [argument for argument in dims if f"{argument}{EXTENTS}" in arguments]
    counts_first = workload.definition.parameters().get("dynamic") is DYNAMIC
    follows = FOLLOWS.get(workload.op) if not taken else None
    joined: dict[str, Follows] = {}  # arguments whose extents y follows
    for argument, extents in dims.items():
        if argument in taken and not (counts_first and _unknown(extents[1:])):
            continue
        if any(same(extents[0], dims[each][0]) for each in taken) and not _unknown(extents[1:]):
            continue  # its rows are read with those of an array whose rows the kernel counts
        axes = follows(workload, argument) if follows is not None else {}
        if any(isinstance(extent, Unknown) and axis not in axes for axis, extent in enumerate(extents)):
            raise _fixed(call, workload, argument, dims)
        if axes:
            joined[argument] = axes
    first = next((argument for argument in joined if _unknown(dims[argument])), None)
    if first is None:
        return None
    if first not in _NAMES:
        raise _fixed(call, workload, first, dims)
    for other in joined:
        if (apart := _apart(dims, joined, first, other)) and not _chosen(dims[first], dims[other]):
            raise _fixed(call, workload, other, dims)
        if apart:
            meetings.append(Meeting(first, other, apart))
    return _function(workload, dims, first, joined[first])


def _apart(dims: Dims, joined: Mapping[str, Follows], first: str, other: str) -> tuple[tuple[int, Along], ...]:
    """Along which axes two arguments may give y different extents: axes of the first, and what the other's have to be."""
    to = {along.axis: (axis, along) for axis, along in joined[first].items()}
    found = []
    for axis, along in joined[other].items():
        mine, of_first = to.get(along.axis, (-1, along))
        one, two = (line.of(dims[name][place]) for line, name, place in ((of_first, first, mine), (along, other, axis)))
        if mine >= 0 and _unknown((one, two)) and not same(one, two):
            found.append((mine, of_first._replace(axis=axis)))
    return tuple(found)


def traced(name: str, op: str, function: ShapeFunction, dims: Dims, elements: Dims, bound: Sequence[int]) -> tuple[Dim, ...]:
    """The extents of an output by its shape function.

    Args:
        elements: argument -> what is known of its elements.
    """
    if function.counted:
        only = _COUNTED_AXIS.get(op)
        return tuple(n if only is not None and axis != only else Unknown(f"{name}:{axis}") for axis, n in enumerate(bound))
    given = [
        dims[each] if function.needs[each] is Dependence.SHAPE else elements.get(each, _Values(f"{name}:{each}"))
        for each in function.inputs
    ]
    limit = elements.get("limit", ())
    if op == "arange" and elements.get("start") == (0,) and elements.get("delta") == (1,) and len(limit) == 1:
        count = limit[0]
        if isinstance(count, Unknown) and count.is_extent:  # 0, 1 ... for each row of something
            return (count,)
    found: list[Dim] = []
    chosen = all(not isinstance(each, _Values) and _chosen(each) for each in given)  # the host computes it then
    for axis in range(len(bound)):
        try:
            extent = function.extent(axis, *given)
        except (TypeError, ArithmeticError, IndexError):
            extent = None
        if isinstance(extent, int) and not op:  # numbers wrap on the device
            extent = (extent + 2**63) % 2**64 - 2**63
        new = Unknown(f"{name}:{axis}", bool(op), chosen=chosen)
        found.append(extent if isinstance(extent, int | Unknown) else new)
    return tuple(found)


class _Values(Sequence[Any]):
    """Numbers of which not even the count matters."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getitem__(self, place: Any) -> Any:
        return Unknown(f"{self._name}[{place}]")

    def __len__(self) -> int:
        raise TypeError(f"{self._name} is known at run time only")


def _unknown(extents: Sequence[Dim]) -> bool:
    return any(isinstance(extent, Unknown) for extent in extents)


def _chosen(*arrays: Sequence[Dim]) -> bool:
    """Whether all extents follow from the sizes that a caller chooses."""
    return all(not isinstance(each, Unknown) or each.chosen for extents in arrays for each in extents)


def _fixed(call: str, workload: Workload, argument: str, dims: Dims) -> UsageError:
    remedy = {"indices": ", or set dynamic", "x": ", or set dynamic_x"} if workload.op in _LOOK_UPS else {}
    return UsageError(
        f"{call}: {workload.label} takes {argument} of fixed extents; it gets {list(dims[argument])}, some of which are "
        f"known at run time only; give them one size{remedy.get(argument, '')}"
    )


def _function(workload: Workload, dims: Dims, source: str, axes: Mapping[int, Along]) -> ShapeFunction:
    """Extents of one argument where an axis of y follows one of it, otherwise the bound's."""
    shape = workload.outputs[0].shape
    to = {along.axis: (mine, along) for mine, along in axes.items()}
    none = (-1, Along(-1))
    ways = [to.get(axis, none) for axis in range(len(shape))]
    columns = {name: [getattr(along, name) for _, along in ways] for name in ("times", "plus", "over")}
    places = [place for place, _ in ways]
    params = {"source": source, "arguments": list(dims), "shape": list(shape), "places": places, **columns}
    return numbers.function("follow", params)


# ---- gather and scatter


_LOOK_UPS = ("gather", "scatter")


def must_read_x(workload: Workload, dims: Dims) -> bool:
    """Whether a gather or scatter needs `dynamic_x`: extents of x are unknown, and an index might count along them, or y has
    them in a way that does not follow from x alone."""
    axes = {axis for axis, extent in enumerate(dims["x"]) if isinstance(extent, Unknown)}
    return bool(axes) and not axes <= _rows_of_x(workload, dims)


def _rows_of_x(workload: Workload, dims: Dims) -> set[int]:
    """The axes of x that may be unknown without `dynamic_x`: each row is only used with the same row of indices or y."""
    p, x, indices = workload.params, dims["x"], dims["indices"]
    if workload.op == "gather" and p["by"] == "slices":
        return set() if p["dynamic"] else set(range(p["axis"]))
    if workload.op == "gather" and p["by"] == "tuples":
        is_later = p["batch_dims"] > 0
    else:
        is_later = p["by"] == "elements" and p["axis"] > 0
    return {0} if is_later and p["dynamic"] and same(x[0], indices[0]) else set()


def _looked_up(call: str, workload: Workload, dims: Dims) -> ShapeFunction | None:
    """`followed` of a gather or scatter."""
    p, x, indices = workload.params, dims["x"], dims["indices"]
    if _unknown(indices) and not p["dynamic"]:
        raise _fixed(call, workload, "indices", dims)
    if p["by"] == "tuples" and isinstance(indices[-1], Unknown):
        raise UsageError(
            f"{call}: the tuples in indices of {list(indices)} have a length that is known at run time only; give them one"
        )
    if not p["dynamic_x"] and must_read_x(workload, dims):
        raise _fixed(call, workload, "x", dims)
    places = len(indices) - 1 if p["by"] == "tuples" else len(indices)
    batch = [axis for axis in range(p.get("batch_dims", 0)) if isinstance(x[axis], Unknown)]
    alike: list[tuple[str, Sequence[Dim], Sequence[Dim]]] = [
        ("indices", [indices[axis] for axis in batch], [x[axis] for axis in batch])
    ]
    if "updates" in dims:
        rows = (*indices[:places], *(x[p["indices"][-1] :] if p["by"] == "tuples" else ()))
        alike.append(("updates", dims["updates"], rows or (1,)))
    for name, found, wanted in alike:
        if any(isinstance(one, Unknown) and not same(one, other) for one, other in zip(found, wanted)):
            others = " and ".join(f"{each} of {list(dims[each])}" for each in ("x", "indices") if each != name)
            raise UsageError(f"{call} reads {name} of {list(dims[name])} with {others}; their extents may differ")
    if p["dynamic_x"] or not _unknown(x) or (workload.op == "gather" and p["dynamic"]):
        return None  # the operator has a shape function, or y fixed extents
    return _function(workload, dims, "x", {axis: Along(axis) for axis in _rows_of_x(workload, dims)})
