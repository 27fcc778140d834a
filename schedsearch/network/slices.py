"""Slices that cost nothing, because the kernels that read them take them out of the larger array."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from schedsearch.network.chain import Chain, Operand
from schedsearch.network.facts import FLOATS
from schedsearch.network.graph import Constant
from schedsearch.network.shuffles import takes_slice

if TYPE_CHECKING:
    import onnx_ir as ir

ALIGNED_READS = 8  # channels of 16-bit numbers that fill 16 bytes


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
