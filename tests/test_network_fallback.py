"""Networks with nodes that ONNX Runtime computes: which nodes go together, what they compute, and what their file holds."""

from __future__ import annotations

import itertools
import json
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import network_support as support
import numpy as np
import pytest
from cli_support import schedsearch as command
from hypothesis import given
from hypothesis import strategies as st
from onnx_support import Net as Model

import schedsearch
from schedsearch.errors import DatabaseError, UsageError
from schedsearch.executable.build import build
from schedsearch.executable.file import load
from schedsearch.executable.program import Foreign, Program, unseal
from schedsearch.executable.stored import save
from schedsearch.network.graph import Control, Network, Subgraph, Value

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

import onnx_ir as ir  # noqa: E402
from onnx import TensorProto, helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from schedsearch.network.evaluate import evaluate  # noqa: E402
from schedsearch.network.fallback import lower_with_subgraphs  # noqa: E402
from schedsearch.network.lower import lower  # noqa: E402
from schedsearch.network.model import ModelError, read_model  # noqa: E402
from schedsearch.network.subgraphs import cuts, inputs_of_all  # noqa: E402

Array = np.ndarray[Any, Any]


def anything(workload: Any) -> str:
    """Every workload has a kernel."""
    return ""


def crops() -> Model:
    """a -> {one -> view -> two -> view2} -> b + one -> relu -> {three}; CenterCropPad has no operator here."""
    net = Model(1, 8, 6, 6)
    image = net.row(1, 16, 6, 6)
    one = net.node("CenterCropPad", net.conv("x", 16, 8, name="a"), image, name="one")
    row = net.row(1, 16, 36)
    two = net.node("CenterCropPad", net.node("Reshape", one, row, name="view"), row, name="two")
    back = net.node("Reshape", two, net.row(1, 16, 6, 6), name="view2")
    total = net.node("Add", net.conv(back, 16, 16, name="b"), one, name="add")
    net.results = [total, net.node("CenterCropPad", net.node("Relu", total, name="relu"), image, name="three")]
    return net


def subgraphs_of(network: Network) -> list[Subgraph]:
    return [node for node in network.nodes if isinstance(node, Subgraph)]


def image(*shape: int) -> Array:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


# --- Which nodes go together --------------------------------------------------------------------------------------------
def graph_of(edges: Sequence[Sequence[int]]) -> ir.Model:
    """Node number i reads the nodes edges[i], or the input if there are none. Every node's result leaves the graph."""
    tensor = {"type": ir.TensorType(ir.DataType.FLOAT), "shape": ir.Shape([1])}
    x = ir.Value(name="x", **tensor)
    nodes: list[ir.Node] = []
    for number, read in enumerate(edges):
        inputs = [nodes[each].outputs[0] for each in read] or [x]
        nodes.append(ir.Node("", "Sum", inputs, outputs=[ir.Value(name=f"v{number}", **tensor)], name=f"n{number}"))
    return ir.Model(ir.Graph([x], [node.outputs[0] for node in nodes], nodes=nodes, opset_imports={"": 21}), ir_version=10)


def fewest_runs(edges: Sequence[Sequence[int]], lacking: Sequence[bool]) -> int:
    """By brute force: of all orders in which the nodes can run, the fewest runs of lacking nodes one after the other."""
    found = len(edges)
    for order in itertools.permutations(range(len(edges))):
        place = {node: number for number, node in enumerate(order)}
        if all(place[read] < place[node] for node, reads in enumerate(edges) for read in reads):
            found = min(found, sum(is_lacking for is_lacking, _ in itertools.groupby(lacking[node] for node in order)))
    return found


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[list[int]], list[bool]]:
    count = draw(st.integers(1, 6))
    edges = [draw(st.lists(st.sampled_from(range(n)), max_size=2, unique=True)) if n else [] for n in range(count)]
    return edges, [draw(st.booleans()) for _ in range(count)]


@given(graphs())
def test_parts_are_as_few_as_possible_and_run_as_a_whole(graph: tuple[list[list[int]], list[bool]]) -> None:
    edges, lacking = graph
    model = graph_of(edges)
    found = cuts(model, {node: "" for node, is_lacking in zip(model.graph, lacking) if is_lacking})
    assert len(found) == fewest_runs(edges, lacking)
    owner = {node.name: number for number, cut in enumerate(found) for node in cut.reasons}
    assert sorted(owner) == sorted(node.name for node, is_lacking in zip(model.graph, lacking) if is_lacking)
    whole = {number: {f"n{n}" for n in range(len(edges)) if owner.get(f"n{n}") == number} for number in range(len(found))}
    done: set[str] = set()
    units = [*whole.values(), *({f"n{n}"} for n in range(len(edges)) if f"n{n}" not in owner)]
    while units:  # every unit can run when all that it reads from outside has run
        ready = [
            unit for unit in units if all({f"n{read}" for read in edges[int(name[1:])]} <= done | unit for name in unit)
        ]
        assert ready
        done |= set().union(*ready)
        units = [unit for unit in units if unit not in ready]


def test_values_that_a_body_reads_belong_to_its_node() -> None:
    (node,) = (each for each in ir.from_proto(conditional()).graph if each.op_type == "If")
    assert [value.name for value in inputs_of_all(node)] == ["flag", "c.out"]


def test_views_between_two_parts_belong_to_them(tmp_path: Path) -> None:
    network = lower_with_subgraphs(read_model(crops().save(tmp_path)), anything)
    first, second = subgraphs_of(network)
    assert first.sources == ("one", "view", "two") and second.sources == ("three",)
    assert first.reasons == (
        "CenterCropPad: schedsearch lacks this operator",
        "Reshape: only subgraphs read and write it",
        "CenterCropPad: schedsearch lacks this operator",
    )
    assert (first.reads, first.writes) == (("a.out",), ("one.out", "two.out"))


# --- What they compute --------------------------------------------------------------------------------------------------
def conditional() -> Any:
    """c = relu(conv(x)); y = relu(If(flag: c + c, else c)): the branches read c, and have nodes that have operators. One
    takes an element by a computed index, so that both cannot be computed."""

    def branch(name: str, *nodes: Any) -> Any:
        return helper.make_graph(list(nodes), name, [], [helper.make_tensor_value_info(f"{name}.y", 1, [1, 8, 6, 6])])

    net = Model(1, 8, 6, 6)
    c = net.node("Relu", net.conv("x", 8, 8, name="conv"), name="c")
    first = [
        helper.make_node("Constant", [], ["row"], value_ints=[1]),
        helper.make_node("Not", ["flag"], ["not"]),
        helper.make_node("Cast", ["not"], ["zero"], to=TensorProto.INT64),
        helper.make_node("Reshape", ["zero", "row"], ["index"]),
        helper.make_node("Gather", [c, "index"], ["first"], axis=0),
    ]
    twice = branch("then", *first, helper.make_node("Add", ["first", c], ["then.y"], name="twice"))
    once = branch("else", helper.make_node("Relu", [c], ["else.y"], name="once"))
    either = net.node("If", "flag", name="either", then_branch=twice, else_branch=once)
    net.node("Relu", either, name="last")
    model = net.model()
    model.graph.input.append(helper.make_tensor_value_info("flag", TensorProto.BOOL, []))
    model.graph.value_info.append(helper.make_tensor_value_info(either, 1, [1, 8, 6, 6]))
    return model


def resized() -> Any:
    """c = relu(conv(x)); y = relu(the largest pixel of If(flag: pooled c, else -c) of each channel)."""

    def branch(name: str, op: str, **attributes: Any) -> Any:
        node = helper.make_node(op, [c], [f"{name}.y"], name=name, **attributes)
        return helper.make_graph([node], name, [], [helper.make_tensor_value_info(f"{name}.y", 1, None)])

    net = Model(1, 8, 6, 6)
    c = net.node("Relu", net.conv("x", 8, 8, name="conv"), name="c")
    small = branch("small", "MaxPool", kernel_shape=[2, 2], strides=[2, 2])
    either = net.node("If", "flag", name="either", then_branch=small, else_branch=branch("same", "Neg"))
    largest = net.node("GlobalMaxPool", either, name="largest")
    net.node("Relu", largest, name="last")
    model = net.model()
    model.graph.input.append(helper.make_tensor_value_info("flag", TensorProto.BOOL, []))
    model.graph.value_info.append(helper.make_tensor_value_info(largest, 1, [1, 8, 1, 1]))
    return model


def counted() -> Model:
    """The largest pixels, counted and added to the channels' means; the shape of NonZero's result is not known before."""
    net = Model(2, 8, 6, 6)
    large = net.node("Greater", net.conv("x", 8, 8, name="conv"), net.numbers(1.0), name="large")
    places = net.node("Transpose", net.node("NonZero", large, name="places"), perm=[1, 0], name="turned")
    ones = net.node("ConstantOfShape", net.node("Shape", places, name="shape"), name="zeros")
    share = net.node("ReduceSum", net.node("Add", ones, net.numbers(0.25), name="quarters"), keepdims=0, name="sum")
    net.node("Add", net.node("GlobalAveragePool", "x", name="mean"), share, name="total")
    return net


def check(model: Any, inputs: dict[str, Array], **options: Any) -> Network:
    """What lowering gives, which has computed the model's results by the operators' references and ONNX's evaluator."""
    network = lower_with_subgraphs(options.pop("read")(model), anything, **options)
    found = evaluate(network, inputs)
    for name, wanted in zip(network.outputs, ReferenceEvaluator(model).run(None, inputs)):
        np.testing.assert_allclose(found[name], np.reshape(wanted, found[name].shape), rtol=2e-3, atol=2e-3)
    return network


@pytest.fixture
def read(tmp_path: Path) -> Any:
    def read(model: Any) -> Any:
        onnx.save(model, tmp_path / "net.onnx")
        return read_model(tmp_path / "net.onnx")

    return read


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_a_network_with_parts_computes_what_its_model_does(read: Any, dtype: str | None) -> None:
    network = check(crops().model(), {"x": np.round(image(1, 8, 6, 6) * 4) / 256}, read=read, dtype=dtype)
    (port,) = onnx.load_model_from_string(subgraphs_of(network)[0].model).graph.input
    assert port.type.tensor_type.elem_type == (TensorProto.FLOAT if dtype is None else TensorProto.FLOAT16)


@pytest.mark.parametrize("flag", [True, False])
def test_branches_read_values_from_outside(read: Any, flag: bool) -> None:
    network = check(conditional(), {"x": image(1, 8, 6, 6), "flag": np.array(flag)}, read=read)
    (either,) = (node for node in network.nodes if isinstance(node, Control))
    assert either.sources == ("either",) and set(either.reads) == {"flag", "c.out"}
    assert subgraphs_of(network) == []  # a kernel computes each node inside


@pytest.mark.parametrize("flag", [True, False])
def test_branches_of_different_shapes_compute_what_is_behind_them_too(read: Any, flag: bool) -> None:
    network = check(resized(), {"x": image(1, 8, 6, 6), "flag": np.array(flag)}, read=read)
    assert subgraphs_of(network) == [] and "either.out" not in network.values


def test_nodes_without_a_known_shape_run_there_together(read: Any) -> None:
    network = check(counted().model(), {"x": image(2, 8, 6, 6)}, read=read)
    (subgraph,) = subgraphs_of(network)
    assert {"places", "turned", "shape", "zeros", "quarters"} <= set(subgraph.sources)
    assert subgraph.reasons[subgraph.sources.index("turned")].startswith("Transpose: the shape of 'places.out' is ")


def test_nodes_that_no_template_takes_run_there(read: Any) -> None:
    def no_pools(workload: Any) -> str:
        return "no pools here" if workload.op == "pool2d" else ""

    net = Model(1, 8, 6, 6)
    net.conv(net.node("MaxPool", "x", kernel_shape=[3, 3], name="pool"), 8, 8, name="conv")
    network = lower_with_subgraphs(read(net.model()), no_pools)
    (subgraph,) = subgraphs_of(network)
    assert (subgraph.sources, subgraph.reasons) == (("pool",), ("MaxPool: no pools here",))


def test_a_kernel_reads_integers_that_a_part_makes_and_dequantises(read: Any) -> None:
    def no_elements(workload: Any) -> str:
        return "no elements here" if workload.op == "elementwise" else ""

    net = Model(2, 4)
    scale, zero = net.numbers(0.125), net.numbers(0, dtype=np.int8)
    real = net.node("DequantizeLinear", net.node("QuantizeLinear", "x", scale, zero, name="whole"), scale, zero)
    weight = net.node("DequantizeLinear", net.weight("codes", 4, 3, dtype=np.int8), scale, zero)
    product = net.node("MatMul", real, weight, name="product")
    back = net.node("DequantizeLinear", net.node("QuantizeLinear", product, scale, zero), scale, zero)
    net.results = [net.node("Softsign", real), back]
    x = np.random.default_rng(0).integers(-20, 20, (2, 4)).astype(np.float32) / 8
    network = lower_with_subgraphs(read(net.model()), no_elements)
    assert "whole.out" in subgraphs_of(network)[0].writes
    assert any(node.arguments["x"] == "whole.out" for node in network.nodes if node.name == "product")
    values = evaluate(network, {"x": x})
    for name, wanted in zip(net.results, ReferenceEvaluator(net.model()).run(None, {"x": x})):
        np.testing.assert_allclose(values[name], wanted, rtol=1e-6)


def test_results_of_unknown_shape_are_refused(read: Any) -> None:
    net = Model(1, 8, 6, 6)
    net.node("NonZero", net.conv("x", 8, 8), name="places")
    with pytest.raises(ModelError, match=r"the shape of 'places.out' at node places \(NonZero\) is"):
        lower_with_subgraphs(read(net.model()), anything)


def test_all_nodes_are_listed_with_the_remedy(read: Any) -> None:
    wanted = r"CenterCropPad: one, two, three\. Run them in ONNX Runtime: .*--fallback onnxruntime"
    with pytest.raises(ModelError, match=wanted):
        lower(read(crops().model()))


# --- Files --------------------------------------------------------------------------------------------------------------
NEGATIVE = helper.make_model(
    helper.make_graph(
        [helper.make_node("Neg", ["a"], ["b"])],
        "part",
        [helper.make_tensor_value_info("a", 1, [1, 8, 6, 6])],
        [helper.make_tensor_value_info("b", 1, [1, 8, 6, 6])],
    ),
    opset_imports=[helper.make_opsetid("", 21)],
    ir_version=10,
)


def with_a_subgraph() -> Network:
    """Two convolutions, and y negated by ONNX Runtime."""
    network = support.two_convolutions()
    subgraph = Subgraph("negative", ("neg",), ("Neg: for the test",), ("y",), ("z",), NEGATIVE.SerializeToString())
    values = {**network.values, "z": Value("z", "NCHW", (1, 8, 6, 6), "float32")}
    return replace(network, outputs=("z",), values=values, nodes=(*network.nodes, subgraph))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save(support.build(with_a_subgraph(), schedsearch.detect("cpu")), tmp_path / "model.ssx")
    return tmp_path / "model.ssx"


def test_a_part_is_in_the_program_and_its_model_in_the_file(path: Path) -> None:
    with sqlite3.connect(path) as file:
        ((program,),) = file.execute("SELECT program FROM executable")
        models = [data for (data,) in file.execute("SELECT data FROM weight")]
    program = json.dumps(unseal(program, required=True), sort_keys=True, separators=(",", ":"))
    call = Program.from_json(program).calls[-1]
    assert (call.label, call.sources, call.workload) == ("Neg", ("neg",), "")
    assert call.foreign == Foreign(len(NEGATIVE.SerializeToString()), ("Neg: for the test",))
    assert NEGATIVE.SerializeToString() in models
    assert Program.from_json(program).json == program


def test_a_file_with_a_subgraph_needs_onnx_runtime(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UsageError, match=r"small.onnx \(Neg\) needs ONNX Runtime, which is not installed .*pip install"):
        load(path)
    with pytest.raises(UsageError, match=r"fallback='onnxruntime' needs ONNX Runtime, which is not installed"):
        build("net.onnx", target="cpu", fallback="onnxruntime")
    with pytest.raises(UsageError, match="fallback 'tvm' is not possible; allowed: onnxruntime, or None"):
        build("net.onnx", target="cpu", fallback="tvm")


def test_the_model_of_a_part_cannot_be_changed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", SimpleNamespace())
    other = NEGATIVE.SerializeToString().replace(b"Neg", b"Abs")
    with sqlite3.connect(path) as file:
        file.execute("UPDATE weight SET data = ? WHERE data = ?", (other, NEGATIVE.SerializeToString()))
    file.close()
    with pytest.raises(DatabaseError, match=r"table weight, .* it does not match its checksum"):
        load(path)


# --- With ONNX Runtime --------------------------------------------------------------------------------------------------
@pytest.fixture
def runtime() -> Iterator[Any]:
    yield pytest.importorskip("onnxruntime")


@pytest.mark.integrations
def test_a_part_reads_and_writes_the_networks_memory(runtime: Any, path: Path) -> None:
    truth = {}
    with load(path) as net:
        for scale in (1, 2):  # outputs are new arrays, at other addresses
            x = np.round(image(1, 8, 6, 6)) * np.float32(scale)
            truth = support.truth(support.two_convolutions(), {"x": x})
            np.testing.assert_array_equal(net(x), -truth["y"])
        np.testing.assert_array_equal(net.trace(x)["z"], -truth["y"])
        assert len(net.measure(2).calls_ns) == len(net.steps)
        explained = net.explain()
    assert "4 kernel calls, 2 of them convert layouts; 1 subgraph in ONNX Runtime" in explained
    assert "negative: Neg by ONNX Runtime (CPUExecutionProvider, " in explained and "neg: Neg: for the test" in explained
    assert "without copies: 1,152 bytes in, 1,152 bytes out" in explained
    with pytest.raises(UsageError, match="the net was closed"):
        net.explain()


@pytest.mark.integrations
def test_the_command_builds_runs_and_compares(runtime: Any, tmp_path: Path) -> None:
    model = crops().save(tmp_path)
    # One layout: which one predicted times prefer depends on the processor.
    options = ("--layout", "NCHW", "--target", "cpu", "--db", tmp_path / "none.db", "-o", tmp_path / "net.ssx")
    done = command("build", model, *options)
    assert done.exit_code == 2
    assert "CenterCropPad: one, two, three" in done.stderr and "--fallback onnxruntime" in done.stderr
    done = command("build", model, *options, "--fallback", "onnxruntime", "--explain")
    assert done.exit_code == 0, done.stderr
    assert "ONNX Runtime computes 3 nodes as one: one: CenterCropPad: schedsearch lacks this operator; view:" in done.stderr
    assert "3 kernel calls and 2 subgraphs in ONNX Runtime" in done.stdout
    assert "3 of 3 kernels have no record" in done.stderr
    done = command("run", tmp_path / "net.ssx", "--compare", "onnx", "--repeat", "2", "--json")
    found = json.loads(done.stdout)
    errors = {each["value"]: each["relative"] for each in found["errors"]}
    assert {"one.out", "two.out", "three.out", "add.out"} <= set(errors) and max(errors.values()) < 1e-5
    assert [call["template"] for call in found["calls"]].count("onnxruntime") == 2
    again = tmp_path / "again.ssx"
    command("build", model, *options[:-1], again, "--fallback", "onnxruntime")
    assert again.read_bytes() == (tmp_path / "net.ssx").read_bytes()


@pytest.mark.integrations
@pytest.mark.parametrize("io_layout", ["NCHW", "NHWC"])
def test_flags_and_unknown_shapes_run_as_the_reference_says(runtime: Any, tmp_path: Path, io_layout: str) -> None:
    flag = {"flag": np.array(True)}
    for number, (model, extra) in enumerate(((conditional(), flag), (resized(), flag), (counted().model(), {}))):
        path = tmp_path / f"{number}.onnx"
        onnx.save(model, path)
        x = image(*(each.dim_value for each in model.graph.input[0].type.tensor_type.shape.dim))
        (wanted,) = ReferenceEvaluator(model).run(None, {"x": x, **extra})
        given = {name: array.astype(np.uint8) for name, array in extra.items()}
        options = {"db": tmp_path / "none.db", "target": "cpu", "fallback": "onnxruntime", "io_layout": io_layout}
        with build(path, **options) as net:  # type: ignore[arg-type]
            turned = x if io_layout == "NCHW" else np.ascontiguousarray(x.transpose(0, 2, 3, 1))
            y = net(turned, **given)
        y = y if io_layout == "NCHW" else y.transpose(0, 3, 1, 2)
        np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-4)


def looped() -> Any:
    """conv; two rounds of x = x + x in a Loop, which stacks their pixels; and a Transpose and a view by a shape behind it.

    ONNX's evaluator runs no turn without a condition, and stacks arrays of one axis only as ONNX says.
    """
    info = helper.make_tensor_value_info
    ports = [info("turn", TensorProto.INT64, []), info("go", TensorProto.BOOL, []), info("v", TensorProto.FLOAT, None)]
    nodes = [
        helper.make_node("Add", ["v", "v"], ["w"]),
        helper.make_node("Constant", [], ["flat"], value_ints=[-1]),
        helper.make_node("Reshape", ["w", "flat"], ["pixels"]),
        helper.make_node("Identity", ["go"], ["on"]),
    ]
    results = [info("on", TensorProto.BOOL, []), *(info(name, TensorProto.FLOAT, None) for name in ("w", "pixels"))]
    body = helper.make_graph(nodes, "body", ports, results)
    net = Model(1, 8, 6, 6)
    always = net.node("ReduceMax", "x", keepdims=0)
    rounds = net.node(
        "Cast", net.node("Clip", always, net.numbers(2.0), net.numbers(2.0)), to=TensorProto.INT64, name="rounds"
    )
    begins = net.numbers(True, dtype=np.bool_)
    net.node("Loop", rounds, begins, net.conv("x", 8, 8, name="conv"), name="loop", outputs=2, body=body)
    turned = net.node("Transpose", "loop.out1", perm=[1, 0], name="turned")
    net.node("Reshape", net.node("Relu", turned, name="relu"), net.node("Shape", "loop.out1", name="shape"), name="view")
    return net.model()


@pytest.mark.integrations
def test_shapes_that_a_node_hides_are_observed(runtime: Any, read: Any) -> None:
    network = check(looped(), {"x": image(1, 8, 6, 6)}, read=read)
    (subgraph,) = subgraphs_of(network)
    assert subgraph.sources[-1] == "loop" and {"conv", "turned"} <= {node.name for node in network.nodes}


@pytest.mark.integrations
def test_shapes_that_follow_from_numbers_are_not_observed(runtime: Any, read: Any) -> None:
    """Both runs of the observation have no zeros, and NonZero 64 places; a later run may have others."""
    net = Model(8, 8)
    net.node("Relu", net.node("NonZero", "x", name="places"))
    with pytest.raises(ModelError, match=r"the shape of 'relu1.out' at node"):
        lower_with_subgraphs(read(net.model()), anything)


def selected() -> Any:
    """y = relu(If(flag: pixels of a mask, else the others)): as many for all truths and the flag as for none without it."""

    def branch(name: str, mask: str, *before: Any) -> Any:
        nodes = [*before, helper.make_node("Compress", ["x", mask], [f"{name}.y"], name=name)]
        return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(f"{name}.y", 1, None)])

    net = Model(8)
    others = branch("others", "turned", helper.make_node("Not", ["mask"], ["turned"]))
    net.node("Relu", net.node("If", "flag", name="either", then_branch=branch("chosen", "mask"), else_branch=others))
    model = net.model()
    for name, shape in (("flag", []), ("mask", [8])):
        model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.BOOL, shape))
    return model


@pytest.mark.integrations
def test_a_shape_by_an_input_of_truths_is_not_observed(runtime: Any, read: Any) -> None:
    with pytest.raises(ModelError, match=r"the shape of '.*' at node"):
        lower_with_subgraphs(read(selected()), anything)


@pytest.mark.integrations
def test_what_onnx_runtime_cannot_run_is_named(runtime: Any, tmp_path: Path) -> None:
    model = Model(1, 8, 6, 6)
    model.node("Relu", "x", name="odd")
    made = model.model()
    made.graph.node[0].op_type, made.graph.node[0].domain = "Twirl", "nobody.example"
    made.opset_import.append(helper.make_opsetid("nobody.example", 1))
    onnx.save(made, tmp_path / "net.onnx")
    with pytest.raises(UsageError, match=r"ONNX Runtime .* cannot run Twirl \(odd\): .*Replace these nodes in the model"):
        build(tmp_path / "net.onnx", db=tmp_path / "none.db", target="cpu", fallback="onnxruntime")


def test_networks_have_their_parts_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", SimpleNamespace())
    with pytest.raises(UsageError, match="a Network has its dtypes, shapes and subgraphs"):
        build(support.two_convolutions(), target="cpu", fallback="onnxruntime")
