"""What inputs must be that decide shapes, so that these are the ones that a model declares.

A network that ONNX Runtime computes in part takes settings, such as the second input of a Reshape, from a call. Numbers
drawn at random would make another shape than the declared one, or none. Small numbers, and those that shapes around the
node suggest, are tried instead, one after another; onnx's inference says what shape each would make.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx
from onnx import NodeProto, helper, numpy_helper

from schedsearch.network.elementwise import ELEMENTWISE
from schedsearch.network.settings import SETTINGS
from schedsearch.network_check.evaluators import NotEvaluableError, OnnxReference, Opened
from schedsearch.network_check.source import Piece, Source
from schedsearch.typed import Array

_MOST_ELEMENTS = 16  # of an input that is a setting rather than data
_MOST_TRIED = 4096
_SMALL = range(9)

Shape = Sequence[int]


def settings_of(source: Source) -> tuple[dict[str, Array], list[str]]:
    """The inputs of a model that decide shapes.

    Returns:
        Input -> a value for which the shapes are those that the model declares, and the inputs for which none was found.
    """
    found: dict[str, Array] = {}
    lacking: dict[str, None] = {}
    search = _Search(source)
    for node in source.model.graph.node:
        names = [node.input[place] for place in SETTINGS.get(node.op_type, {}) if place < len(node.input)]
        operands = [name for name in names if name in source.inputs or name in source.made_by]
        if node.domain not in ("", "ai.onnx") or not operands:
            continue
        piece = source.piece(operands, (), False)
        counts = [math.prod(search.shapes.get(name, [_MOST_ELEMENTS + 1])) for name in piece.takes]
        if not counts or max(counts) > _MOST_ELEMENTS:
            continue  # constants, or data
        found |= search.tried(node, operands, piece, found) or {}
        lacking |= dict.fromkeys(name for name in piece.takes if name not in found)
    return found, [name for name in lacking if name not in found]


class _Search:
    """Attributes:
    shapes: value -> its extents, where they follow from the inputs or are declared, perhaps for a value that is computed
        from it element by element.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.shapes = {
            name: [int(each or 0) for each in shape] for name, shape in source.shapes.items() if None not in shape
        }
        for node in reversed(source.model.graph.node):
            if node.op_type in ELEMENTWISE and len(node.input) == 1 and node.output[0] in self.shapes:
                self.shapes.setdefault(node.input[0], self.shapes[node.output[0]])

    def tried(
        self, node: NodeProto, operands: Sequence[str], piece: Piece, known: Mapping[str, Array]
    ) -> dict[str, Array] | None:
        """The first values of the inputs of a piece that make the declared shapes; None if there are none, or no such shape.

        Args:
            operands: settings of the node, which the piece computes.
            known: what some inputs are.
        """
        wanted = {name: self.shapes[name] for name in node.output if name in self.shapes}
        if not wanted or any(name not in self.shapes for name in node.input if name and name not in operands):
            return None
        x = [] if node.input[0] in operands else self.shapes[node.input[0]]
        pools = [
            [known[name]] if name in known else list(self._candidates(name, x, list(wanted.values())))
            for name in piece.takes
        ]
        try:
            opened = OnnxReference().open(piece.model)
        except NotEvaluableError:
            return None
        for values in itertools.islice(itertools.product(*pools), _MOST_TRIED):
            given = dict(zip(piece.takes, values))
            made = self._made(node, operands, opened, piece.feeds(given))
            if all(made.get(name) == shape for name, shape in wanted.items()):
                return given
        return None

    def _made(
        self, node: NodeProto, operands: Sequence[str], opened: Opened, feeds: Mapping[str, Array]
    ) -> dict[str, list[int]]:
        """The shapes of a node's results by onnx's inference; none if it refuses the node."""
        try:
            arrays = dict(zip(operands, opened.run(feeds)))
        except NotEvaluableError:
            return {}
        model = self._source.model
        data = {each.name: each for each in model.graph.initializer if each.name in node.input}
        data |= {name: numpy_helper.from_array(array, name) for name, array in arrays.items()}
        types = {
            name: helper.make_tensor_type_proto(data[name].data_type, list(data[name].dims))
            if name in data
            else helper.make_tensor_type_proto(self._source.dtypes[name], self.shapes[name])
            for name in node.input
            if name
        }
        opset = next(each.version for each in model.opset_import if each.domain in ("", "ai.onnx"))
        try:
            schema = onnx.defs.get_schema(node.op_type, opset, "")
            found = onnx.shape_inference.infer_node_outputs(
                schema, node, types, data, opset_imports=list(model.opset_import)
            )
        except Exception:  # of many kinds: a node against its rules
            return {}
        return {
            name: [dim.dim_value if dim.HasField("dim_value") else -1 for dim in kind.tensor_type.shape.dim]
            for name, kind in found.items()
            if kind.tensor_type.HasField("shape")
        }

    def _candidates(self, name: str, x: Shape, results: Sequence[Shape]) -> Iterator[Array]:
        """What an input may be.

        Args:
            x: shape of the node's first input; empty if that is a setting.
            results: shapes of its results.
        """
        shape, dtype = self.shapes[name], helper.tensor_dtype_to_np_dtype(self._source.dtypes[name])
        seen = set()
        for numbers in _vectors(math.prod(shape), x, results):
            key = tuple(numbers)
            if len(key) == math.prod(shape) and key not in seen:
                seen.add(key)
                yield np.array(key).reshape(shape).astype(dtype)


def _vectors(count: int, x: Shape, results: Sequence[Shape]) -> Iterator[Sequence[float]]:
    """Numbers for a setting, of this many elements or others."""
    y = results[0]
    if len(x) == len(y):
        yield [one / other if other else 1 for one, other in zip(y, x)]  # repeats, scales
        more = [one - other for one, other in zip(y, x)]
        yield [*(0,) * len(x), *more]  # pads
    if count > 1:
        yield y
        for axis in range(len(y)):
            yield [result[axis] for result in results if axis < len(result)]  # parts
    yield from itertools.combinations(range(max(len(x), len(y))), count)  # axes
    if count == 1:
        yield from ([number] for number in dict.fromkeys((*_SMALL, *y, *x)))
    yield [0] * count
    yield [1] * count
    yield y
    yield x
