"""Concatenations that cost nothing, because convolutions store into slices of the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from schedsearch.network.chain import Chain, Operand
from schedsearch.network.facts import only_reader
from schedsearch.network.graph import Constant

if TYPE_CHECKING:
    import onnx_ir as ir

ALIGNED_CHANNELS = 16  # a slice then begins at a multiple of 16 bytes in every format and layout


def without_concatenations(chains: Sequence[Chain], formats: Sequence[str]) -> list[Chain]:
    """The chains without concatenations of channels whose arguments are all convolutions that nothing else reads.

    The convolutions write the result instead. A concatenation of concatenations is one.

    Args:
        formats: of convolutions that can store into slices.
    """
    kept = list(chains)
    for chain in chains:
        if chain.op == "concat":
            _join(chain, kept)
    makers = {chain.value: chain for chain in kept}
    for chain in [chain for chain in kept if chain.op == "concat"]:
        parts = _parts(chain, makers)
        if parts is None or any(part.params["dtype"] not in formats for part in parts):
            continue
        kept.remove(chain)
        offset = 0
        for part in parts:
            part.params["slice_of"] = sum(each.channels for each in parts)
            part.offset = offset
            part.value = chain.value
            offset += part.channels
        parts[-1].nodes += chain.nodes
    return kept


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
    chain.arguments = {f"x{number}": operand for number, operand in enumerate(operands)}
    chain.params["x"] = shapes


def _parts(chain: Chain, makers: dict[ir.Value, Chain]) -> list[Chain] | None:
    """The convolutions that make the arguments of a concatenation of channels, if they can store into slices."""
    parts = []
    for operand in chain.arguments.values():
        part = None if isinstance(operand, Constant) else makers.get(operand)
        if part is None or part.op != "conv2d" or part in parts or not _is_read_once(part.value):
            return None
        moves = any("depth_to_space" in stage for stage in part.stages if not isinstance(stage, str))
        if moves or part.offset is not None or part.channels % ALIGNED_CHANNELS:
            return None
        parts.append(part)
    return parts if len(chain.params["x"][0]) == 4 and chain.params["axis"] == 1 else None


def _is_read_once(value: ir.Value) -> bool:
    return only_reader(value) is not None
