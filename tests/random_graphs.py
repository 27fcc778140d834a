"""Random valid ONNX graphs, and whether a network that is made of one computes what ONNX's reference evaluator does.

A graph is a pure function of its seed. It grows node by node, and each node is computed at once, so that the next one knows
the shapes and numbers of everything before it. `random_graph_nodes` and `random_graph_parts` have the nodes. Run by hand, it
looks for faults and prints each with the smallest graph that still has it:

    python tests/random_graphs.py FIRST COUNT

A network may have any of the layouts that `build` allows, and leave nodes of some operator to ONNX Runtime. If that is
installed, each node is computed by both, and left out where they differ: ONNX's evaluator is wrong about some.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from schedsearch.errors import SchedsearchError
from schedsearch.network.evaluate import evaluate
from schedsearch.network.fallback import lower_with_subgraphs
from schedsearch.network.graph import Node
from schedsearch.network.lower import LAYOUTS, lower
from schedsearch.network.model import NoOperatorError, load

Array = np.ndarray[Any, Any]
MOST_ELEMENTS = 3000
LARGEST = 1e4
DOUBTED = ("ConvTranspose", "GridSample", "LRN", "LpNormalization", "LpPool", "MaxPool", "NonZero", "Resize")
"""Operators about some of whose nodes ONNX's evaluator 1.23.2 is wrong, or unlike ONNX Runtime."""
OPSETS = (17, 18, 19, 20, 21, 21, 21, 22)


class Unfit(Exception):
    """The graph has nothing that a node could read, or the node's results would not do."""


@dataclass(frozen=True)
class Known:
    """A value of the graph.

    Attributes:
        array: what it is for the inputs that the graph was made with.
        fixed: it does not depend on the inputs' numbers.
        exact: its numbers are multiples of a power of two, without any rounding on the way.
    """

    name: str
    array: Array
    fixed: bool = False
    exact: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def is_float(self) -> bool:
        return self.array.dtype == np.float32


@dataclass
class Graph:
    """A graph that grows.

    Attributes:
        runtime: nodes are also computed by ONNX Runtime; without it, there are none of `DOUBTED`.
        open: input -> axes whose extents have names in the model, and are given when it is read.
    """

    chance: random.Random
    opset: int
    runtime: bool = False
    inputs: dict[str, Array] = field(default_factory=dict)
    values: list[Known] = field(default_factory=list)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: list[onnx.TensorProto] = field(default_factory=list)
    open: dict[str, list[int]] = field(default_factory=dict)
    results: list[str] = field(default_factory=list)
    declared: bool = True

    # --- what nodes read ---
    def pick(self, wanted: Callable[[Known], bool]) -> Known:
        """A value that is computed, more often a late one. Raises Unfit if there is none."""
        found = [each for each in self.values if not each.fixed and wanted(each)]
        if not found:
            raise Unfit
        return found[max(self.chance.randrange(len(found)) for _ in range(2))]

    def numbers(self, *shape: int) -> Array:
        """Multiples of 1/8 in -2 ... 2; sometimes others, in -1 ... 1."""
        draw = np.random.default_rng(self.chance.getrandbits(32))
        if self.chance.random() < 0.5:
            return (draw.integers(-16, 17, shape) / 8).astype(np.float32)
        return draw.uniform(-1, 1, shape).astype(np.float32)

    def input(self, array: Array) -> Known:
        name = f"x{len(self.inputs)}"
        self.inputs[name] = array
        self.values.append(Known(name, array, exact=bool((array * 8 % 1 == 0).all())))
        return self.values[-1]

    def weight(self, array: Any) -> str:
        """A constant as it is."""
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def constant(self, array: Any) -> str:
        """A constant, written in one of several ways, or one of before that has the same numbers."""
        array = np.asarray(array)
        same = [each for each in self.values if each.fixed and _same(each.array, array)]
        if same and self.chance.random() < 0.5:
            return self.chance.choice(same).name
        way = self.chance.randrange(6)
        if way == 0:
            return self.fixed("Constant", value=numpy_helper.from_array(array))
        name = self.weight(array)
        if way == 1:
            return self.fixed("Identity", name)
        if way == 2 and array.ndim > 1:
            order = self.chance.sample(range(array.ndim), array.ndim)
            return self.fixed("Transpose", self.weight(array.transpose(np.argsort(order))), perm=order)
        if way == 3:
            return self.fixed("Reshape", self.weight(array.ravel()), self.weight(np.array(array.shape, np.int64)))
        if way == 4 and array.dtype.kind == "i" and np.abs(array).max(initial=0) < 100:
            return self.fixed("Cast", self.weight(array.astype(np.float32)), to=helper.np_dtype_to_tensor_dtype(array.dtype))
        self.values.append(Known(name, array, fixed=True))
        return name

    def row(self, *numbers: int) -> str:
        return self.constant(np.array(numbers, np.int64))

    # --- nodes ---
    def fixed(self, op: str, *inputs: str, **attributes: Any) -> str:
        """The result of a node that reads constants, or shapes."""
        (known,) = self._made(op, inputs, 1, attributes)
        self.values.append(Known(known.name, known.array, fixed=True))
        return known.name

    def node(self, op: str, *inputs: Known | str, outputs: int = 1, exact: bool = False, **attributes: Any) -> list[Known]:
        """Adds a node.

        Args:
            inputs: values, and names of constants; "" for one that is left out.
            exact: the results are exact if all that the node reads is.

        Raises:
            Unfit: the results are too large, or ONNX does not compute them.
        """
        exact = exact and all(each.exact for each in inputs if isinstance(each, Known))
        names = [each if isinstance(each, str) else each.name for each in inputs]
        found = [Known(each.name, each.array, exact=exact) for each in self._made(op, names, outputs, attributes)]
        self.values += found
        return found

    def _made(self, op: str, inputs: Sequence[str], outputs: int, attributes: Mapping[str, Any]) -> list[Known]:
        number = len(self.nodes)
        names = [f"v{number}" if not place else f"v{number}.{place}" for place in range(outputs)]
        node = helper.make_node(op, list(inputs), names, name=f"n{number}", **attributes)
        arrays = run_node(node, self.arrays, self.opset, runtime=self.runtime)
        for array in arrays:
            if array.size > MOST_ELEMENTS or not array.size or not np.isfinite(array.astype(np.float64)).all():
                raise Unfit
            if array.dtype.kind == "f" and np.abs(array).max() > LARGEST:
                raise Unfit
        self.nodes.append(node)
        return [Known(name, array) for name, array in zip(names, arrays)]

    @property
    def arrays(self) -> dict[str, Array]:
        weights = {each.name: numpy_helper.to_array(each) for each in self.weights}
        return {**weights, **{each.name: each.array for each in self.values}}

    # --- the model ---
    def finish(self) -> None:
        """Makes outputs of what nothing reads, and sometimes of another value, and opens extents of inputs."""
        read = {name for node in self.nodes for name in node.input}
        ends = [
            each.name for each in self.values if not each.fixed and each.name not in read and each.name not in self.inputs
        ]
        others = [each.name for each in self.values if each.name not in ends and each.name not in self.inputs]
        chosen = self.chance.sample(others, min(len(others), self.chance.choice([0, 0, 1, 2])))
        self.results = [*ends[-3:], *chosen]
        if not ends:
            raise Unfit
        self.declared = self.chance.random() < 0.7
        for name, array in self.inputs.items():
            if array.ndim and self.chance.random() < 0.3:
                self.open[name] = self.chance.sample(range(array.ndim), self.chance.randint(1, array.ndim))

    def model(self, results: Sequence[str] = (), inputs: Mapping[str, Array] | None = None) -> onnx.ModelProto:
        """The nodes that results follow from, by default all, as a model.

        Args:
            inputs: those of the model; results of nodes may be among them.
        """
        results, inputs, arrays = results or self.results, self.inputs if inputs is None else inputs, self.arrays
        return _model(self, results, inputs, arrays)


def _model(
    whole: Graph, results: Sequence[str], inputs: Mapping[str, Array], arrays: Mapping[str, Array]
) -> onnx.ModelProto:
    opened = whole.open
    needed, kept = set(results), []
    for node in reversed(whole.nodes):
        if needed & set(node.output) and not set(node.output) & set(inputs):
            kept.append(node)
            needed |= {*node.input, *(name for each in node.attribute for name in _read_inside(each.g))}

    def port(name: str, array: Array) -> onnx.ValueInfoProto:
        shape: list[Any] = list(array.shape)
        if name in opened:
            shape = [f"{name}_{axis}" if axis in opened[name] else extent for axis, extent in enumerate(shape)]
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), shape)

    graph = helper.make_graph(
        kept[::-1],
        "random",
        [port(name, array) for name, array in inputs.items() if name in needed],
        [port(name, arrays[name]) if whole.declared else helper.make_empty_tensor_value_info(name) for name in results],
        [each for each in whole.weights if each.name in needed],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", whole.opset)], ir_version=10)


def _read_inside(graph: onnx.GraphProto) -> Iterator[str]:
    """What a body reads, or gives, from outside."""
    for node in graph.node:
        yield from node.input
    yield from (each.name for each in graph.output)


def run_node(node: onnx.NodeProto, arrays: Mapping[str, Array], opset: int, *, runtime: bool) -> list[Array]:
    """The results of one node by ONNX's reference evaluator.

    Raises:
        Unfit: it cannot compute them, or ONNX Runtime does not agree.
    """
    if not runtime and node.op_type in DOUBTED:
        raise Unfit
    names = {*node.input, *(name for each in node.attribute for name in _read_inside(each.g))}
    feeds = {name: arrays[name] for name in sorted(names) if name in arrays}
    info = helper.make_empty_tensor_value_info
    ports = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in feeds.items()]
    graph = helper.make_graph([node], "one", ports, [info(name) for name in node.output if name])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    try:
        with np.errstate(all="ignore"):
            inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True)
            found = [np.asarray(each) for each in ReferenceEvaluator(model).run(None, feeds)]
    except Exception as error:
        raise Unfit from error
    theirs = by_runtime(inferred, feeds) if runtime else ""
    if isinstance(theirs, dict) and any(map(difference, found, theirs.values())):
        raise Unfit
    return found


def _same(one: Array, other: Array) -> bool:
    return one.dtype == other.dtype and np.array_equal(one, other)


def random_graph(seed: int, *, nodes: int = 12, runtime: bool = False) -> Graph:
    """The graph of a seed.

    Args:
        nodes: at most so many of those in `random_graph_nodes`, and what they need.
        runtime: as of `Graph`.
    """
    from random_graph_nodes import NODES
    from random_graph_parts import PARTS

    chance = random.Random(seed)
    while True:
        graph = Graph(chance, chance.choice(OPSETS), runtime)
        for _ in range(chance.choice([1, 1, 2])):
            rank = chance.choice([1, 2, 3, 4, 4, 4])
            graph.input(graph.numbers(*(chance.choice([1, 2, 3, 4, 6]) for _ in range(rank))))
        count = chance.randint(2, nodes)
        for _ in range(20 * count):
            before = len(graph.nodes), len(graph.values), len(graph.weights)
            try:
                chance.choice((*NODES, *PARTS))(graph)
            except Unfit:
                for grown, length in zip((graph.nodes, graph.values, graph.weights), before):
                    del grown[length:]
            count -= len(graph.nodes) > before[0]
            if not count:
                break
        try:
            graph.finish()
        except Unfit:
            continue
        return graph


# --- Comparisons --------------------------------------------------------------------------------------------------------
def ours(
    model: onnx.ModelProto, inputs: Mapping[str, Array], opened: Mapping[str, Sequence[int]], chance: random.Random
) -> list[Array]:
    """The outputs of a model by our references, each node in one of its implementations.

    Raises:
        SchedsearchError: the model is refused.
    """
    shapes = {each.name: list(inputs[each.name].shape) for each in model.graph.input if each.name in opened}
    loaded = load(model)
    layouts = chance.choice([LAYOUTS, LAYOUTS, ("NHWC", "NCHW"), ("NHWC",), ("NCHW",)])
    options: dict[str, Any] = {"layouts": layouts, "over_time": chance.random() < 0.3, "squeezes": "NHWC" in layouts}
    if chance.random() < 0.3:
        options |= {"slices": ("float32",), "apart": ("DepthToSpace",)}
    lacking = chance.choice(
        ["", "", "", "elementwise", "transpose", "matmul", "conv2d", "pool2d", "concat", "strided_slice"]
    )
    try:
        network = None if lacking else lower(loaded.graph(shapes), **options)
    except NoOperatorError:
        network = None
    if network is None:
        network = lower_with_subgraphs(loaded.graph(shapes), lambda each: "lacking" * (each.op == lacking), **options)

    def any_implementation(node: Node) -> Any:
        return chance.choice(node.implementations)

    found = evaluate(network, {name: inputs[name] for name in network.inputs}, implementation=any_implementation)
    return [found[name] for name in network.outputs]


def difference(found: Array, wanted: Array) -> str:
    """How an array differs from another one; "" if it does not."""
    if found.shape != wanted.shape:
        return f"shape {found.shape}, wanted {wanted.shape}"
    if wanted.dtype == bool:
        found = found.astype(bool)
    one, other = found.astype(np.float64), wanted.astype(np.float64)
    allowed = 1e-4 * max(1.0, float(np.abs(other).max(initial=0))) if wanted.dtype.kind == "f" else 0
    wrong = ~(np.abs(one - other) <= allowed)
    if not wrong.any():
        return ""
    place = tuple(np.argwhere(wrong)[0])
    return f"{int(wrong.sum())} of {wrong.size} elements, first {place}: {one[place]:.7g}, wanted {other[place]:.7g}"


def fault(model: onnx.ModelProto, arrays: Mapping[str, Array], opened: Mapping[str, Sequence[int]], seed: int) -> str:
    """What is wrong with what we make of a model: wrong numbers, or an error that is not ours; else "", or why it is
    refused, in brackets."""
    try:
        found = ours(model, arrays, opened, random.Random(seed))
    except SchedsearchError as error:
        return f"({type(error).__name__}: {error})"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    for port, array in zip(model.graph.output, found):
        if problem := difference(array, arrays[port.name]):
            return f"{port.name}: {problem}"
    return ""


def smaller(graph: Graph, seed: int, is_same: Callable[[str], bool]) -> tuple[onnx.ModelProto, str]:
    """The smallest model that we find by leaving out outputs and by making inputs of values, and that has the fault."""
    results, inputs, arrays = list(graph.results), dict(graph.inputs), graph.arrays

    def tried(results: Sequence[str], inputs: Mapping[str, Array]) -> tuple[onnx.ModelProto, str]:
        model = graph.model(results, inputs)
        try:
            onnx.checker.check_model(model)
        except onnx.checker.ValidationError:
            return model, ""
        return model, fault(model, arrays, graph.open, seed)

    best = tried(results, inputs)
    for name in list(results):
        fewer = [each for each in results if each != name]
        if fewer and is_same((found := tried(fewer, inputs))[1]):
            results, best = fewer, found
    for each in reversed(graph.nodes):
        name = each.output[0]
        if name in results or not any(name in node.input for node in best[0].graph.node):
            continue
        more = {**inputs, name: arrays[name]}
        if is_same((found := tried(results, more))[1]):
            inputs, best = more, found
    return best


def by_runtime(model: onnx.ModelProto, arrays: Mapping[str, Array]) -> dict[str, Array] | str:
    """The outputs by ONNX Runtime without its optimisations, or why it does not compute them."""
    try:
        import onnxruntime as runtime
    except ImportError:
        return "not installed"
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        found = session.run(None, {each.name: arrays[each.name] for each in model.graph.input})
    except Exception as error:
        return str(error).splitlines()[0]
    return dict(zip((each.name for each in model.graph.output), found))


def main(first: int, count: int) -> None:
    """Prints the faults of so many graphs, and what is refused."""
    refused: dict[str, list[int]] = {}
    faults, runtime = 0, importlib.util.find_spec("onnxruntime") is not None
    for seed in range(first, first + count):
        graph = random_graph(seed, runtime=runtime)
        found = fault(graph.model(), graph.arrays, graph.open, seed)
        if found.startswith("("):
            refused.setdefault(found[:60], []).append(seed)
        elif found:
            kind = next((each for each in (": shape", " elements") if each in found), found.split(":")[0])
            model, again = smaller(graph, seed, lambda text, kind=kind: not text.startswith("(") and kind in text)  # type: ignore[misc]
            theirs = by_runtime(model, graph.arrays)
            if isinstance(theirs, dict):
                apart = [difference(array, graph.arrays[name]) for name, array in theirs.items()]
                theirs = "; ".join(filter(None, apart)) or "as ONNX"
            faults += 1
            print(f"seed {seed}: {again or found}\n  ONNX Runtime: {theirs}", flush=True)
            print("  " + onnx.printer.to_text(model.graph).replace("\n", "\n  "), flush=True)
    for text, seeds in sorted(refused.items(), key=lambda each: -len(each[1])):
        print(f"{len(seeds)} refused, e.g. {seeds[:3]}: {text}")
    print(f"{count} graphs, {faults} faults")


if __name__ == "__main__":
    from random_graphs import main as run  # under the name by which the nodes know this module

    run(int(sys.argv[1]), int(sys.argv[2]))
