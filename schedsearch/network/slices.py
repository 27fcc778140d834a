"""Concatenations that cost nothing, because the kernels of their arguments store into slices of the result, and slices that
cost nothing, because the kernels that read them take them out of the larger array."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from schedsearch.network.chain import Chain, Operand
from schedsearch.network.facts import FLOATS, only_reader
from schedsearch.network.graph import Constant
from schedsearch.network.shuffles import takes_slice
from schedsearch.ops.registry import operator

if TYPE_CHECKING:
    import onnx_ir as ir

ALIGNED_READS = 8  # channels of 16-bit numbers that fill 16 bytes
ALIGNED_CHANNELS = 16  # a slice then begins at a multiple of 16 bytes in every dtype and layout


def without_concatenations(chains: Sequence[Chain], dtypes: Sequence[str] | None) -> list[Chain]:
    """The chains without concatenations of channels whose arguments are stored into slices of the result.

    Any operator with the parameter `slice_of` can do that, if nothing else reads what it makes. Arguments that follow one
    another and that none makes so are concatenated into a slice, too; if there are several such groups, the concatenation
    stays. A concatenation of concatenations is one.

    Args:
        dtypes: of convolutions that can store into slices; None: no operator stores into slices.
    """
    kept = list(chains)
    for chain in chains:
        if chain.op == "concat":
            _join(chain, kept)
    if dtypes is None:
        return kept
    makers = {chain.value: chain for chain in kept if not chain.others}
    for chain in [chain for chain in kept if chain.op == "concat"]:
        groups = _groups(chain, makers, dtypes)
        if groups is None:
            continue
        kept.remove(chain)
        offset, last = 0, kept[0]
        for part, channels in groups:
            if part is None:
                part = _rest(chain, offset, channels)
                kept.append(part)
            if part.op == "conv2d":
                part.params["slice_of"] = sum(count for _, count in groups)
            part.offset, part.channels, part.value = offset, channels, chain.value
            offset += channels
            last = part
        if all(part is not None for part, _ in groups):
            last.nodes += chain.nodes
    return kept


def without_slices(
    chains: Sequence[Chain], unread: Collection[ir.Node] = (), dtypes: Sequence[str] | None = None
) -> list[Chain]:
    """The chains without slices that element-wise chains and convolutions alone read: these read them where they are.

    Splits are slices. Of slices of slices, only the last one is read in place. Slices that go backwards stay, and those that
    some convolution would read more slowly than a copy of its own (`_reads_slice`).

    Args:
        unread: nodes whose results nothing reads, because chains read what is before them.
        dtypes: of convolutions that can read slices; None: no convolution reads them.
    """
    kept = list(chains)
    for chain in chains:
        source = chain.arguments.get("x")
        if chain.op != "strided_slice" or source is None or isinstance(source, Constant) or chain.offset is not None:
            continue
        readers = [each for each in kept if any(operand is chain.value for operand in each.arguments.values())]
        inside = {node for each in readers for node in each.nodes}
        x, (begin, shape, strides) = chain.params["x"], _positions(chain)
        ones = set(strides) == {1}
        if (
            not readers
            or not all(_reads_slice(each, chain.value, dtypes, x, begin, shape, ones) for each in readers)
            or not all(user in inside or user in unread for user, _ in chain.value.uses())
            or chain.value.is_graph_output()
            or min(*strides, *shape) < 1
        ):
            continue
        for reader in readers:
            names = [name for name, operand in reader.arguments.items() if operand is chain.value]
            for name in names:
                reader.arguments[name] = source
            if reader.op == "conv2d":
                reader.params["x_slice"] = [x[1], begin[1]]
                continue
            reader.params["inputs"] = [
                [*each, list(x), begin, strides] if each[0] in names else each for each in reader.params["inputs"]
            ]
        readers[0].nodes[:0] = chain.nodes
        kept.remove(chain)
    return kept


def _reads_slice(
    reader: Chain, value: Operand, dtypes: Sequence[str] | None, x: Sequence[int], begin: Sequence[int],
    shape: Sequence[int], ones: bool,
) -> bool:  # fmt: skip
    """Whether a chain reads a slice of an array of extents `x` where it is; `ones`: of neighbours along every axis.

    A convolution of single pixels does, if the slice is of channels and either they are the last of the array, which TMA
    reads as well, or they fill no 16 bytes, so that TMA would not read a copy either.
    """
    of_channels = ones and len(x) == 4 and takes_slice(x, begin, shape)
    if reader.op == "elementwise":
        return of_channels if reader.shuffles else True
    if reader.op != "conv2d" or dtypes is None or reader.params["dtype"] not in dtypes or not of_channels:
        return False
    p = reader.params
    others = [operand for name, operand in reader.arguments.items() if name != "x"]
    pointwise = (p["r"], p["s"], p.get("groups", 1)) == (1, 1, 1) and not p.get("zero_points")
    last, unaligned = begin[1] + shape[1] == x[1], shape[1] % ALIGNED_READS != 0 or begin[1] % ALIGNED_READS != 0
    return pointwise and p["dtype"] in FLOATS and value not in others and (last or unaligned)


def _positions(chain: Chain) -> tuple[list[int], list[int], list[int]]:
    """First position, count and distance of positions along each axis of a slice."""
    params = chain.params
    chosen = [
        range(extent)[slice(begin, end, step)]
        for extent, begin, end, step in zip(params["x"], params["begin"], params["end"], params["strides"])
    ]
    return [each.start for each in chosen], [len(each) for each in chosen], [each.step for each in chosen]


def _join(chain: Chain, chains: list[Chain]) -> None:
    """Takes in every concatenation along the same axis that only this one reads."""
    makers = {each.value: each for each in chains if each.op == "concat"}
    operands: list[Operand] = []
    shapes = []
    for operand, shape in zip(chain.arguments.values(), chain.params["x"]):
        inner = None if isinstance(operand, Constant) else makers.get(operand)
        if inner is None or inner.params["axis"] != chain.params["axis"] or not _is_read_once(inner.value):
            operands.append(operand)
            shapes.append(shape)
            continue
        operands += inner.arguments.values()
        shapes += inner.params["x"]
        chain.nodes[:0] = inner.nodes
        chains.remove(inner)
    _set_arguments(chain, operands, shapes)


def _set_arguments(chain: Chain, operands: Iterable[Operand], shapes: list[Sequence[int]]) -> None:
    chain.arguments = {f"x{number}": operand for number, operand in enumerate(operands)}
    chain.params["x"] = shapes


def _groups(chain: Chain, makers: dict[ir.Value, Chain], dtypes: Sequence[str]) -> list[tuple[Chain | None, int]] | None:
    """What stores each slice of a concatenation of channels, and how many it has: a chain that makes one argument, or None
    for arguments that must be copied. None if it is not worth while."""
    shapes = chain.params["x"]
    if len(shapes[0]) != 4 or chain.params["axis"] != 1:
        return None
    parts: list[Chain | None] = []
    for operand in chain.arguments.values():
        part = None if isinstance(operand, Constant) else makers.get(operand)
        parts.append(part if part is not None and part not in parts and _can_slice(part, dtypes) else None)
    channels = [shape[1] for shape in shapes]
    groups: list[tuple[Chain | None, int]] = []
    for copied, members in itertools.groupby(zip(parts, channels), lambda each: each[0] is None):
        found = list(members)
        groups += [(None, sum(count for _, count in found))] if copied else found
    copies = sum(part is None for part, _ in groups)
    aligned = all(count % ALIGNED_CHANNELS == 0 for _, count in groups)
    return groups if aligned and copies <= 1 and copies < len(groups) else None


def _can_slice(part: Chain, dtypes: Sequence[str]) -> bool:
    if "slice_of" not in operator(part.op).parameters() or part.offset is not None or not _is_read_once(part.value):
        return False
    if part.op != "conv2d":
        return True
    moves = any("depth_to_space" in stage for stage in part.stages if not isinstance(stage, str))
    return not moves and part.params["dtype"] in dtypes


def _rest(chain: Chain, first: int, channels: int) -> Chain:
    """The concatenation of those arguments whose channels begin at `first`."""
    ends = list(itertools.accumulate(shape[1] for shape in chain.params["x"]))
    chosen = [place for place, end in enumerate(ends) if first < end <= first + channels]
    operands = list(chain.arguments.values())
    rest = Chain("concat", dict(chain.params), list(chain.nodes), chain.value, {})
    _set_arguments(rest, [operands[place] for place in chosen], [chain.params["x"][place] for place in chosen])
    return rest


def _is_read_once(value: ir.Value) -> bool:
    return only_reader(value) is not None
