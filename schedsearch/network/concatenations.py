"""Concatenations that cost nothing, because the kernels of their arguments store into slices of the result.

In a DenseNet every layer reads the concatenation of all results before it. Such a series has one array, that of its last
concatenation: every layer stores its channels there, and reads the first channels of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from schedsearch.network.chain import Chain, Operand
from schedsearch.network.facts import only_reader
from schedsearch.network.graph import Constant
from schedsearch.ops.registry import operator

if TYPE_CHECKING:
    import onnx_ir as ir

ALIGNED_CHANNELS = 16  # a slice then begins at a multiple of 16 bytes in every dtype and layout


def without_concatenations(chains: Sequence[Chain], dtypes: Sequence[str] | None, cuts: bool = True) -> list[Chain]:
    """The chains without concatenations of channels whose arguments are stored into slices of the result.

    Any operator with the parameter `slice_of` can do that, if nothing else reads what it makes but element-wise chains, as
    they can take slices. Arguments that follow one another and that none makes so are concatenated into a slice, too; if
    there are several such groups, the concatenation stays. A concatenation of concatenations is one.

    Args:
        dtypes: of convolutions that can store into slices; None: no operator stores into slices.
        cuts: element-wise chains may read slices where they are.
    """
    kept = list(chains)
    for chain in chains:
        if chain.op == "concat":
            _join(chain, kept)
    if dtypes is None:
        return kept
    for series in _series([chain for chain in kept if chain.op == "concat" and _is_of_channels(chain)]):
        if len(series) == 1 or not _store(series, kept, dtypes, cuts):
            for chain in series:
                _store([chain], kept, dtypes, cuts)
    return kept


def _join(chain: Chain, chains: list[Chain]) -> None:
    """Takes in every concatenation along the same axis that only this one reads."""
    makers = {each.value: each for each in chains if each.op == "concat"}
    operands: list[Operand] = []
    shapes = []
    for operand, shape in zip(chain.arguments.values(), chain.params["x"]):
        inner = None if isinstance(operand, Constant) else makers.get(operand)
        if inner is None or inner.params["axis"] != chain.params["axis"] or only_reader(inner.value) is None:
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


def _is_of_channels(chain: Chain) -> bool:
    return len(chain.params["x"][0]) == 4 and chain.params["axis"] == 1


# --- series of concatenations ---
def _series(concatenations: Sequence[Chain]) -> list[list[Chain]]:
    """Concatenations of which each begins with all arguments of the one before; most stand alone."""
    found: list[list[Chain]] = []
    arguments = {id(chain): [id(operand) for operand, _ in _flat(chain, concatenations)] for chain in concatenations}
    for chain in sorted(concatenations, key=lambda chain: -len(arguments[id(chain)])):
        own = arguments[id(chain)]
        longer = [each for each in found if len(own) < len(first := arguments[id(each[0])]) and first[: len(own)] == own]
        if longer:
            longer[0].insert(0, chain)
        else:
            found.append([chain])
    return found


def _flat(chain: Chain, concatenations: Sequence[Chain]) -> list[tuple[Operand, Sequence[int]]]:
    """The arguments of a concatenation with their shapes; those of `concatenations` among them are replaced by theirs."""
    makers = {each.value: each for each in concatenations}
    found: list[tuple[Operand, Sequence[int]]] = []
    for operand, shape in zip(chain.arguments.values(), chain.params["x"]):
        inner = None if isinstance(operand, Constant) else makers.get(operand)
        found += [(operand, shape)] if inner is None else _flat(inner, concatenations)
    return found


# --- one series in one array ---
@dataclass
class _Slice:
    """Neighbouring channels of the array of a series.

    Attributes:
        operands, shapes: the arguments of the concatenations that lie there; several are copied together.
        first: the first channel.
        maker: what stores an argument there; None: it is copied.
        readers: element-wise chains that read it as well.
    """

    operands: list[Operand]
    shapes: list[Sequence[int]]
    first: int
    maker: Chain | None
    readers: Sequence[Chain] = ()

    @property
    def channels(self) -> int:
        return sum(shape[1] for shape in self.shapes)


def _store(series: Sequence[Chain], kept: list[Chain], dtypes: Sequence[str], cuts: bool) -> bool:
    """Makes the arguments of a series slices of the last concatenation's result. Returns whether it was possible and worth
    while; the concatenations are gone then."""
    if any(chain.offset is not None for chain in series) or not _is_nested(series):
        return False  # one is a slice of another array already, or would lie elsewhere than at the beginning
    whole, others = series[-1], [chain for chain in kept if chain not in series]
    found = _slices(series, others, dtypes, cuts)
    shorter = {chain.value: _cutting(chain.value, series, others, cuts) for chain in series[:-1]}
    if found is None or any(readers is None for readers in shorter.values()):
        return False
    makers = {id(each.maker) for each in found}
    cut = {value: (readers or [], 0) for value, readers in shorter.items()}
    cut |= {each.maker.value: (each.readers, each.first) for each in found if each.maker is not None}
    if any(id(reader) in makers for readers, _ in cut.values() for reader in readers):
        return False  # a kernel would read and write one array
    extents = list(found[0].shapes[0])
    extents[1] = _channels(whole, series)
    for value, (readers, first) in cut.items():
        for reader in readers:
            _cut(reader, value, whole.value, extents, first)
    nodes = [node for chain in series for node in chain.nodes]
    for each in found:
        maker = each.maker
        if maker is None:
            maker = Chain("concat", dict(whole.params), list(series[0].nodes), whole.value, {})
            _set_arguments(maker, each.operands, each.shapes)
            kept.append(maker)
            nodes = [node for node in nodes if node not in maker.nodes]
        if maker.op == "conv2d":
            maker.params["slice_of"] = extents[1]
        maker.offset, maker.channels, maker.value = each.first, each.channels, whole.value
    last = next(each.maker for each in reversed(found) if each.maker is not None)
    last.nodes += nodes
    for chain in series:
        kept.remove(chain)
    return True


def _is_nested(series: Sequence[Chain]) -> bool:
    """Whether each begins with all arguments of the one before, with concatenations outside of the series whole."""
    flat = [[id(operand) for operand, _ in _flat(chain, series)] for chain in series]
    return all(longer[: len(shorter)] == shorter for shorter, longer in pairwise(flat))


def _slices(series: Sequence[Chain], others: Sequence[Chain], dtypes: Sequence[str], cuts: bool) -> list[_Slice] | None:
    """What lies in the array of a series; None if it is not worth while."""
    pairs, makers = _flat(series[-1], series), {chain.value: chain for chain in others if not chain.others}
    found: list[_Slice] = []
    first = 0
    for place, (operand, shape) in enumerate(pairs):
        maker = None if isinstance(operand, Constant) else makers.get(operand)
        readers: Sequence[Chain] | None = None
        if maker is not None and _can_slice(maker, dtypes) and sum(operand is each for each, _ in pairs) == 1:
            # What stores the last one stands where the concatenation does, perhaps behind other readers.
            readers = _cutting(maker.value, series, others, cuts and place + 1 < len(pairs))
        if readers is not None:
            found.append(_Slice([operand], [shape], first, maker, readers))
        elif found and found[-1].maker is None:
            found[-1].operands.append(operand)
            found[-1].shapes.append(shape)
        else:
            found.append(_Slice([operand], [shape], first, None))
        first += shape[1]
    copies = [each for each in found if each.maker is None]
    aligned = all(each.channels % ALIGNED_CHANNELS == 0 for each in found)
    # A copy is made where the first of the series stands.
    early = len(series) == 1 or all(each.first + each.channels <= _channels(series[0], series) for each in copies)
    return found if aligned and early and len(copies) <= 1 and len(copies) < len(found) else None


def _channels(chain: Chain, series: Sequence[Chain]) -> int:
    return sum(shape[1] for _, shape in _flat(chain, series))


def _can_slice(maker: Chain, dtypes: Sequence[str]) -> bool:
    if "slice_of" not in operator(maker.op).parameters() or maker.offset is not None:
        return False
    if maker.op != "conv2d":
        return True
    moves = any("depth_to_space" in stage for stage in maker.stages if not isinstance(stage, str))
    return not moves and maker.params["dtype"] in dtypes


def _cutting(value: ir.Value, series: Sequence[Chain], others: Sequence[Chain], cuts: bool) -> list[Chain] | None:
    """The chains apart from a series that read a value; None if one of them cannot read it as a slice of another one."""
    readers = [chain for chain in others if any(operand is value for operand in chain.arguments.values())]
    inside = {node for chain in (*series, *readers) for node in chain.nodes}
    possible = not readers or (cuts and all(_takes_cut(chain, value) for chain in readers))
    return readers if possible and not value.is_graph_output() and all(user in inside for user, _ in value.uses()) else None


def _takes_cut(reader: Chain, value: ir.Value) -> bool:
    """Whether a chain reads a value of four dimensions by entries that can be made slices, in any layout: a reader in plain
    order would need a copy of an array of which only a part is written."""
    names = [name for name, operand in reader.arguments.items() if operand is value]
    return (
        reader.op == "elementwise"
        and not reader.shuffles
        and len(reader.params["y"]) == 4
        and all(len(each) == len(("name", "dtype", "extents")) for each in reader.params["inputs"] if each[0] in names)
    )


def _cut(reader: Chain, value: ir.Value, whole: ir.Value, extents: Sequence[int], first: int) -> None:
    """Makes an element-wise chain read a value as channels of a larger one, from `first` on."""
    names = [name for name, operand in reader.arguments.items() if operand is value]
    begin, strides = [0, first, 0, 0], [1] * len(extents)
    for name in names:
        reader.arguments[name] = whole
    reader.params["inputs"] = [
        [*each, list(extents), begin, strides] if each[0] in names else each for each in reader.params["inputs"]
    ]
