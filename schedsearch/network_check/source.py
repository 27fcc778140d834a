"""The model that a network was made from, as it was read, in pieces that ONNX Runtime or onnx's evaluator can compute.

A piece computes some values of the model from others. In its noisy form every value is wrong by about as much as dtypes and
the lengths of sums allow, so that running it shows how far a right network may be from the model:

- A value that a node computes is off by a unit roundoff of its dtype, and in float16 it is rounded to it.
- A weight is off by a unit roundoff of the dtype that the network keeps it in.
- What a node adds up, K products or numbers, is off by K units of float32, in which kernels add: no order of a sum of K
  numbers is worse (Higham, Accuracy and Stability of Numerical Algorithms, 4.2).

`direction` and `chance` are inputs of a noisy piece: it computes with errors of one sign everywhere, or random ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from schedsearch.network.model import read_proto
from schedsearch.network_check.branches import conditions, counting, loops, turns_of, with_bodies
from schedsearch.network_check.known_faults import replacement
from schedsearch.network_check.protos import (
    inferred,
    is_random,
    outside,
    reads_of,
    rename,
    shell,
    single,
    value_info,
    wide,
    widen,
)  # fmt: skip
from schedsearch.network_check.sums import RECURRENT, length_of
from schedsearch.network_check.unspecified import leaves_open, with_stand_in
from schedsearch.typed import Array

DIRECTION, CHANCE = "/direction", "/chance"
_GIVEN = "/given"  # suffix of a value that a piece takes
_SINGLE = 2.0**-24  # unit roundoffs
ROUNDOFF = {TensorProto.FLOAT: 4 * _SINGLE, TensorProto.FLOAT16: 2.0**-11, TensorProto.BFLOAT16: 2.0**-8}
ROUNDOFF[TensorProto.DOUBLE] = ROUNDOFF[TensorProto.FLOAT]  # in which the network keeps it
_SINGLES = int(TensorProto.FLOAT)
_FORMATS: dict[str, int] = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
_LARGE = 1 << 10  # elements; such weights are given to a piece, not copied into it
_MOST_NOISE = 1e-2
_SHAPES_ONLY = ("Shape", "Size")
_PRODUCTS = ("Conv", "ConvTranspose", "MatMul", "Gemm", "Einsum", "FusedConv", "FusedMatMul", "FusedGemm")
_ROWS = (
    "ReduceSum", "ReduceMean", "ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceProd", "AveragePool", "GlobalAveragePool",
    "LayerNormalization", "InstanceNormalization", "GroupNormalization", "MeanVarianceNormalization", "LpPool", "CumSum",
    "DFT", "STFT", "RMSNormalization", "LpNormalization", "LRN", "SimplifiedLayerNormalization", "SkipLayerNormalization",
    "Col2Im",
)  # fmt: skip
_CANCELLING = (
    "Elu", "Selu", "Celu", "Gelu", "Mish", "Softplus", "LogSoftmax", "HardSwish", "Swish", "Erf", *RECURRENT,
)  # fmt: skip
"""They add or subtract numbers around 1, so that a small result has the error of these."""
_SHARES = ("Softmax", "LogSoftmax", "ReduceLogSumExp")
"""What they add up is not what they read: their results are off by as much as the sums."""
_PLACES = (("GridSample", 1),)
"""Inputs that are places around 0 in an image of extent 2: so is the error of a place, whatever its number is."""
_NO_NOISE = {"Resize": (1, 2, 3), "Upsample": (1,), "Pow": (1,), "Range": (0, 1, 2), "NonMaxSuppression": (2, 3, 4)}
"""Inputs of nodes that are settings: an extent follows from them, or a power of a negative number."""


@dataclass
class Source:
    """A model with its weights.

    Attributes:
        name: of the file or module, for messages.
        model: in float32 where it was float16 or bfloat16; without large weights.
        weights: name -> array, of those that a piece takes as inputs.
        dtypes: value -> ONNX's number of its dtype in the model as it was read, where it is known.
        shapes: value -> its extents as far as they are known.
        dtype: the dtype in which the network computes numbers in floating point; None: that of the model.
        compared_s: how long it took to compare the model with what it was exported from; 0 if that was not done.
        undecided: the model with its `If`s and `Loop`s, in its own dtypes; None if it has none.
    """

    name: str
    model: ModelProto
    weights: dict[str, Array]
    dtypes: dict[str, int]
    shapes: dict[str, list[int | None]]
    dtype: str | None = None
    compared_s: float = 0.0
    made_by: dict[str, NodeProto] = field(default_factory=dict)
    undecided: ModelProto | None = None

    def __post_init__(self) -> None:
        graph = self.model.graph
        self.constants = {each.name for each in graph.initializer}
        self.inputs = [
            each.name for each in graph.input if each.name not in self.constants and each.name not in self.weights
        ]
        self.outputs = [each.name for each in graph.output]
        self.made_by = {name: node for node in graph.node for name in node.output if name}
        self.places = {name: place for place, node in enumerate(graph.node) for name in node.output if name}
        self.types = {each.name: each for each in graph.input}
        self._depends = set(self.inputs)
        self.random: set[str] = set()
        for node in graph.node:
            reads = list(reads_of(node))
            if node.op_type not in _SHAPES_ONLY and any(each in self._depends for each in reads):
                self._depends.update(node.output)
            if is_random(node) or any(each in self.random for each in reads):
                self.random.update(node.output)

    @classmethod
    def of_file(cls, path: Path, dtype: str | None = None) -> Source:
        """The model in a file. Weights beside it are mapped into memory, not read."""
        return cls.of_proto(read_proto(path)[0], path, dtype)

    @classmethod
    def of_proto(cls, model: ModelProto, path: Path, dtype: str | None) -> Source:
        """As `of_file`, of a file that was read and checked; the model is changed."""
        return cls._of(model, path.name, dtype, path.resolve().parent)

    @classmethod
    def of_graph(cls, model: object, name: str, dtype: str | None = None) -> Source:
        """An `onnx_ir.Model`, which does not change."""
        import onnx_ir as ir

        return cls._of(ir.serde.serialize_model(model), name, dtype, None)

    @classmethod
    def _of(cls, model: ModelProto, name: str, dtype: str | None, folder: Path | None) -> Source:
        weights: dict[str, Array] = {}
        graph, taken = model.graph, {each.name for each in model.graph.input}
        kept, outputs = [], {each.name for each in graph.output}
        for tensor in graph.initializer:
            if math.prod(tensor.dims) <= _LARGE or tensor.name in outputs or tensor.data_type == TensorProto.STRING:
                if tensor.external_data and folder is not None:
                    tensor.CopyFrom(numpy_helper.from_array(outside(tensor, folder), tensor.name))
                kept.append(tensor)
                continue
            external = tensor.data_location == TensorProto.EXTERNAL and folder is not None
            weights[tensor.name] = outside(tensor, folder) if external and folder else numpy_helper.to_array(tensor)
            if tensor.name not in taken:
                graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
        kept = [TensorProto.FromString(each.SerializeToString()) for each in kept]
        del graph.initializer[:]
        graph.initializer.extend(kept)
        return cls._of_shell(model, name, weights, dtype)

    @classmethod
    def _of_shell(cls, model: ModelProto, name: str, weights: Mapping[str, Array], dtype: str | None) -> Source:
        """Of a model without its large weights, which is changed."""
        undecided = None
        if conditions(model) or loops(model):
            undecided = ModelProto()
            undecided.CopyFrom(model)
        dtypes, shapes = inferred(model)
        widen(model)
        wide_weights = {key: single(each) for key, each in weights.items()}
        return cls(name, model, wide_weights, dtypes, shapes, dtype, undecided=undecided)

    def decided(self, decide: Callable[[Source, Sequence[str]], Mapping[str, Array]]) -> Source:
        """The model with the branches that it takes in the place of its `If`s, and with the turns of its `Loop`s.

        Args:
            decide: what some values of a model are.
        """
        found, before = self, -1
        while found.undecided is not None and len(found.undecided.graph.node) != before:
            before = len(found.undecided.graph.node)
            names, counted = conditions(found.undecided), [turns_of(node) for node in loops(found.undecided)]
            counter = self._of_shell(counting(found.undecided), self.name, self.weights, self.dtype) if counted else found
            values = decide(counter, [*names, *counted])
            truths = {name: bool(np.any(values[name])) for name in names}
            model = with_bodies(found.undecided, truths, {name: int(values[name]) for name in counted})
            found = self._of_shell(model, self.name, self.weights, self.dtype)
        return found

    def format_of(self, value: str) -> int:
        """ONNX's number of the dtype in which the network keeps a value of floating point."""
        own = self.dtypes.get(value, _SINGLES)
        if own not in ROUNDOFF:
            return own
        return _FORMATS[self.dtype] if self.dtype is not None else _SINGLES if own == TensorProto.DOUBLE else own

    def is_floating(self, value: str) -> bool:
        return self.dtypes.get(value, TensorProto.UNDEFINED) in ROUNDOFF

    def is_float_power(self, node: NodeProto) -> bool:
        """Whether a node gives integers that are powers with an exponent in floating point."""
        return node.op_type == "Pow" and not self.is_floating(node.output[0]) and self.is_floating(node.input[1])

    def roundoff(self, value: str) -> float:
        """By how much every element of a value is wrong at least in a noisy piece, relative to it; 0 if by nothing."""
        if value not in self.made_by or value not in self._depends or not self.is_floating(value):
            return 0.0
        return ROUNDOFF.get(self.format_of(value), ROUNDOFF[TensorProto.FLOAT])

    def piece(self, wanted: Sequence[str], given: Collection[str], noisy: bool, stand_in: int | None = None) -> Piece:
        """What computes values from those given and the model's inputs; a value that is both is computed, too.

        Args:
            stand_in: number of that for what ONNX leaves open, see `unspecified`.
        """
        return _Cut(self, frozenset(given), noisy, stand_in).piece(wanted)

    def reads(self, value: str) -> list[str]:
        """The values that the node of a value reads."""
        return [] if value not in self.made_by else list(reads_of(self.made_by[value]))

    def reads_before(self, value: str, given: Collection[str]) -> set[str]:
        """The values that the nodes between a value and those given read."""
        return {read for each in self._before(value, given) for read in self.reads(each)}

    def ops_before(self, value: str, given: Collection[str]) -> set[str]:
        """Operators of the nodes between a value and those given."""
        return {self.made_by[each].op_type for each in self._before(value, given)}

    def may_be_unspecified(self, value: str, given: Collection[str]) -> bool:
        """Whether a node between a value and those given leaves something open."""
        return any(leaves_open(self.made_by[each], self.dtypes) for each in self._before(value, given))

    def constants_before(self, value: str, given: Collection[str]) -> list[str]:
        """Values before a value that depend on no input, and that nodes which do read."""
        inside = self._before(value, given)
        found = dict.fromkeys(
            read
            for each in inside
            if each in self._depends
            for read in self.reads(each)
            if read in self.made_by and read not in self._depends and read not in given
        )
        return list(found)

    def _before(self, value: str, given: Collection[str]) -> dict[str, None]:
        """A value that a node makes and those before it, up to those given."""
        found = dict.fromkeys([value] if value in self.made_by else [])
        left = list(found)
        while left:
            for read in self.reads(left.pop()):
                if read in self.made_by and read not in found and read not in given:
                    found[read] = None
                    left.append(read)
        return found

    def unit_of_bias(self, node: NodeProto, place: int) -> tuple[str, str] | None:
        """The scales whose product a bias is a multiple of in a network that adds integers: those of the dequantised factors
        of a convolution or matrix product, if this input of a node is its bias."""
        product = node
        if node.op_type == "Add":
            product = next((made for name in node.input if (made := self.made_by.get(name)) is not None), node)
        if product.op_type not in ("Conv", "Gemm", "MatMul") or place != (2 if product is node else place):
            return None
        factors = [self.made_by.get(name) for name in product.input[:2]]
        scales = [each.input[1] for each in factors if each is not None and each.op_type == "DequantizeLinear"]
        constant = all(name not in self._depends for name in (*scales, node.input[place]))
        return (scales[0], scales[1]) if constant and len(scales) == 2 else None

    def describe(self, value: str) -> str:
        """The node that computes a value, for messages."""
        node = self.made_by.get(value)
        return "" if node is None else f"node {node.name or node.output[0]} ({node.op_type})"


@dataclass(frozen=True)
class Piece:
    """A model that computes some values of another.

    Attributes:
        takes: value of the whole model -> name of the input.
        ops: operators in it.
    """

    model: ModelProto
    takes: Mapping[str, str]
    weights: Mapping[str, Array]
    wanted: Sequence[str]
    ops: frozenset[str]

    def feeds(self, values: Mapping[str, Array], noise: tuple[float, float] | None = None) -> dict[str, Array]:
        """All inputs. `noise`: direction and chance of a noisy piece."""
        found: dict[str, Array] = {}
        for each in self.model.graph.input:
            if each.name in self.weights:
                found[each.name] = self.weights[each.name]
        for value, name in self.takes.items():
            kind = next(each for each in self.model.graph.input if each.name == name).type.tensor_type
            wanted = helper.tensor_dtype_to_np_dtype(kind.elem_type)
            array = np.asarray(values[value])
            if not kind.shape.dim and kind.HasField("shape"):
                array = array.reshape(())
            found[name] = array.astype(wanted)
        if noise is not None:
            names = {each.name for each in self.model.graph.input}
            pairs = zip((DIRECTION, CHANCE), noise)
            found |= {name: np.asarray(number, np.float32) for name, number in pairs if name in names}
        return found


class _Cut:
    """Makes one piece."""

    def __init__(self, source: Source, given: frozenset[str], noisy: bool, stand_in: int | None) -> None:
        self._source, self._given, self._noisy, self._stand_in = source, given, noisy, stand_in
        self._opset = max((each.version for each in source.model.opset_import if each.domain in ("", "ai.onnx")), default=0)
        self._nodes: list[NodeProto] = []
        self._constants: dict[str, TensorProto] = {}
        self._noisy_copies: dict[tuple[str, float, bool], str] = {}
        self._seed = 0

    def piece(self, wanted: Sequence[str]) -> Piece:
        source = self._source
        graph = source.model.graph
        needed, kept = {each for each in wanted if each in source.made_by}, []
        for node in reversed(graph.node):
            if any(name in needed for name in node.output):
                kept.append(node)
                needed.update(name for name in reads_of(node) if name not in self._given and name in source.made_by)
        reads: dict[str, None] = {}
        for node in reversed(kept):
            reads |= dict.fromkeys(reads_of(node))
            self._add(node)
        takes = {name: name + _GIVEN for name in reads if name in self._given}
        takes |= {name: name for name in (*reads, *wanted) if name in source.inputs and name not in takes}
        inputs = [self._input(name, to) for name, to in takes.items()]
        weights = [name for name in dict.fromkeys((*reads, *wanted)) if name in source.weights]
        inputs += [self._input(name, name) for name in weights]
        if self._noisy and self._seed:
            inputs += [helper.make_tensor_value_info(name, TensorProto.FLOAT, []) for name in (DIRECTION, CHANCE)]
        outputs = []
        for number, name in enumerate(wanted):
            self._nodes.append(helper.make_node("Identity", [name], [f"/out{number}"]))
            kind = source.dtypes.get(name, TensorProto.UNDEFINED)
            outputs.append(value_info(f"/out{number}", wide(kind), None))
        used = {name for node in self._nodes for name in reads_of(node)}
        constants = [each for each in graph.initializer if each.name in used]
        made = ModelProto()
        made.CopyFrom(shell(source.model))
        made.graph.name = graph.name or "piece"
        made.graph.node.extend(self._nodes)
        made.graph.input.extend(inputs)
        made.graph.output.extend(outputs)
        made.graph.initializer.extend([*constants, *self._constants.values()])
        ops = frozenset(node.op_type for node in kept)
        return Piece(made, takes, {name: source.weights[name] for name in weights}, wanted, ops)

    def _input(self, name: str, to: str) -> onnx.ValueInfoProto:
        known = self._source.types.get(name)
        shape = self._source.shapes.get(name)
        rank_0: list[int] | None = [] if shape == [] else None
        if known is not None and name not in self._source.inputs:
            info = onnx.ValueInfoProto()
            info.CopyFrom(known)
            info.name = to
            return info
        kind = self._source.dtypes.get(name, TensorProto.FLOAT)
        return value_info(to, wide(kind), rank_0)

    def _add(self, node: NodeProto) -> None:
        """A node, with noise."""
        copy = NodeProto()
        copy.CopyFrom(node)
        rename(copy, {name: name + _GIVEN for name in self._given})
        noisy = self._noisy and any(name in self._source._depends for name in node.output)
        if noisy:
            for place, name in enumerate(node.input):
                if name and self._source.is_floating(name) and (scales := self._source.unit_of_bias(node, place)):
                    copy.input[place] = self._rounded_bias(copy.input[place], *scales)
                elif name and (delta := self._noise_of_input(node, place, name)):
                    is_place = (node.op_type, place) in _PLACES
                    copy.input[place] = self._noisy_copy(name, copy.input[place], delta, absolute=is_place)
            for place, name in enumerate(node.output):
                if name and (self._source.is_floating(name) or self._source.is_float_power(node)):
                    copy.output[place] = f"{name}/clean"
        kind = wide(self._source.dtypes.get(node.output[0], TensorProto.UNDEFINED))
        if self._stand_in is not None and leaves_open(node, self._source.dtypes):
            nodes, constants = with_stand_in(copy, kind, self._stand_in)
            self._nodes += nodes
            self._constants |= {name: numpy_helper.from_array(array, name) for name, array in constants.items()}
        else:
            self._nodes += replacement(copy, kind, self._opset)
        if not noisy:
            return
        if self._source.is_float_power(node):
            self._whole_noise(f"{node.output[0]}/clean", node.output[0], kind)
        for name in node.output:
            if name and self._source.is_floating(name):
                kind = self._source.format_of(name)
                delta = ROUNDOFF.get(kind, ROUNDOFF[TensorProto.FLOAT])
                if node.op_type in _SHARES:
                    length = length_of(node, [self._source.shapes.get(node.input[0])])
                    delta = min(_MOST_NOISE, max(delta, _SINGLE * length))
                self._noise(f"{name}/clean", name, delta, kind, absolute=node.op_type in _CANCELLING)

    def _noise_of_input(self, node: NodeProto, place: int, name: str) -> float:
        source = self._source
        if not source.is_floating(name) or place in _NO_NOISE.get(node.op_type, ()):
            return 0.0
        if name not in source._depends:
            kind = source.format_of(name)
            return max(ROUNDOFF.get(kind, 0.0), ROUNDOFF[TensorProto.FLOAT])
        if node.op_type == "QuantizeLinear" and place == 0:
            return ROUNDOFF[TensorProto.FLOAT]
        if place in RECURRENT.get(node.op_type, ()):
            if node.op_type == "DynamicQuantizeLSTM":
                return _MOST_NOISE
            length = length_of(node, [source.shapes.get(each) for each in node.input])
            return min(_MOST_NOISE, max(_SINGLE * length, ROUNDOFF.get(source.format_of(name), 0.0)))
        if (node.op_type, place) in _PLACES:
            return ROUNDOFF[TensorProto.FLOAT]
        if place < 2 and node.op_type in (*_PRODUCTS, *_ROWS):
            length = length_of(node, [source.shapes.get(each) for each in node.input])
            return min(_MOST_NOISE, _SINGLE * max(length, 4))
        return 0.0

    def _noisy_copy(self, name: str, at: str, delta: float, *, absolute: bool = False) -> str:
        key = at, delta, absolute
        if key not in self._noisy_copies:
            self._noisy_copies[key] = f"{at}/noisy{len(self._noisy_copies)}"
            kind = self._source.format_of(name) if name not in self._source._depends else TensorProto.FLOAT
            self._noise(at, self._noisy_copies[key], delta, kind, absolute=absolute)
        return self._noisy_copies[key]

    def _random(self, like: str, y: str) -> NodeProto:
        return helper.make_node(
            "RandomUniformLike", [like], [y], low=-1.0, high=1.0, seed=float(self._seed), dtype=TensorProto.FLOAT
        )

    def _rounded_bias(self, bias: str, x_scale: str, w_scale: str) -> str:
        """A bias that is off by half of the product of scales times direction + chance r: as if it were rounded to it."""
        self._seed += 1
        y = f"{bias}/rounded{self._seed}"
        self._constants["/half"] = numpy_helper.from_array(np.asarray(0.5, np.float32), "/half")
        steps = [
            ("Mul", [f"{y}/r", CHANCE], f"{y}/c"),
            ("Add", [f"{y}/c", DIRECTION], f"{y}/s"),
            ("Mul", [x_scale, w_scale], f"{y}/unit"),
            ("Mul", [f"{y}/unit", "/half"], f"{y}/half"),
            ("Mul", [f"{y}/half", f"{y}/s"], f"{y}/off"),
            ("Add", [bias, f"{y}/off"], y),
        ]
        self._nodes.append(self._random(bias, f"{y}/r"))
        self._nodes += [helper.make_node(op, reads, [to]) for op, reads, to in steps]
        return y

    def _whole_noise(self, x: str, y: str, kind: int) -> None:
        """y = x + s delta x truncated, with delta and s as of `_noise`: x, unless it is larger than float32 can tell."""
        noisy, moved = f"{y}/noisy", f"{y}/moved"
        self._nodes.append(helper.make_node("Cast", [x], [f"{y}/float"], to=TensorProto.FLOAT))
        self._noise(f"{y}/float", noisy, ROUNDOFF[TensorProto.FLOAT], TensorProto.FLOAT)
        self._nodes += [
            helper.make_node("Sub", [noisy, f"{y}/float"], [f"{moved}/float"]),
            helper.make_node("Cast", [f"{moved}/float"], [moved], to=kind),
            helper.make_node("Add", [x, moved], [y]),
        ]

    def _noise(self, x: str, y: str, delta: float, kind: int, *, absolute: bool = False) -> None:
        """y = x (1 + delta s), where s = direction + chance r with r between -1 and 1, rounded to float16 if that is the
        dtype; with `absolute` also plus 4 roundoffs of float32 times s."""
        self._seed += 1
        names = [f"{y}/n{number}" for number in range(8)]
        last = names[7] if kind == TensorProto.FLOAT16 else y
        for name, number in (("/one", 1.0), (f"/delta{delta!r}", delta)):
            self._constants[name] = numpy_helper.from_array(np.asarray(number, np.float32), name)
        steps = [
            self._random(x, names[0]),
            helper.make_node("Mul", [names[0], CHANCE], [names[1]]),
            helper.make_node("Add", [names[1], DIRECTION], [names[2]]),
            helper.make_node("Mul", [names[2], f"/delta{delta!r}"], [names[3]]),
            helper.make_node("Add", [names[3], "/one"], [names[4]]),
            helper.make_node("Mul", [x, names[4]], [names[5] if absolute else last]),
        ]
        if absolute:
            name = f"/delta{ROUNDOFF[TensorProto.FLOAT]!r}"
            self._constants[name] = numpy_helper.from_array(np.asarray(ROUNDOFF[TensorProto.FLOAT], np.float32), name)
            steps += [helper.make_node("Mul", [names[2], name], [names[6]]), helper.make_node("Add", names[5:7], [last])]
        if kind == TensorProto.FLOAT16:
            steps.append(helper.make_node("Cast", [last], [f"{y}/half"], to=TensorProto.FLOAT16))
            steps.append(helper.make_node("Cast", [f"{y}/half"], [y], to=TensorProto.FLOAT))
        self._nodes += steps
