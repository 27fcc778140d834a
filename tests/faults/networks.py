"""Changed ONNX files: what onnx's checker refuses is refused with one message, and nothing is a traceback."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from .commands import call
from .scenario import Batch, Scenario

_FILE = "changed.onnx"


def _network() -> Any:
    """A convolution, activations, a reshape, a matrix product with an addition, and a softmax."""
    rng = np.random.default_rng(0)
    weights = {
        "w": rng.standard_normal((4, 3, 3, 3)), "b": rng.standard_normal(4), "m": rng.standard_normal((64, 5)),
        "c": rng.standard_normal(5),
    }  # fmt: skip
    held = [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()]
    held.append(numpy_helper.from_array(np.array([2, -1], np.int64), "s"))
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["v"], "conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["v"], ["r"], "relu"),
        helper.make_node("MaxPool", ["r"], ["p"], "pool", kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Reshape", ["p", "s"], ["f"], "flat"),
        helper.make_node("MatMul", ["f", "m"], ["q"], "product"),
        helper.make_node("Add", ["q", "c"], ["a"], "sum"),
        helper.make_node("Softmax", ["a"], ["y"], "softmax", axis=1),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3, 8, 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 5])
    graph = helper.make_graph(nodes, "net", [x], [y], held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _name(model: Any, rng: random.Random) -> None:
    """An input or output of a node gets another name: one from nowhere, or one that makes a cycle or comes twice."""
    node = rng.choice(model.graph.node)
    names = node.input if rng.random() < 0.6 else node.output
    others = [*(each for one in model.graph.node for each in one.output), "x", "w", "nowhere", ""]
    names[rng.randrange(len(names))] = rng.choice(others)


def _attribute(model: Any, rng: random.Random) -> None:
    node = rng.choice([each for each in model.graph.node if each.attribute])
    attribute = rng.choice(node.attribute)
    number = rng.choice((-1, -3, 0, 2, 7, 2**31, 2**62, -(2**62)))
    if attribute.type == onnx.AttributeProto.INT:
        attribute.i = number
    elif rng.random() < 0.5:
        attribute.ints[rng.randrange(len(attribute.ints))] = number
    else:
        attribute.ints.append(number)


def _attribute_type(model: Any, rng: random.Random) -> None:
    node = rng.choice(model.graph.node)
    del node.attribute[:]
    name = rng.choice(("axis", "pads", "kernel_shape", "unknown", "alpha"))
    node.attribute.append(helper.make_attribute(name, rng.choice((1, 1.5, "text", [1, 2], [0.5]))))


def _extents(model: Any, rng: random.Random) -> None:
    weight = rng.choice(model.graph.initializer)
    place = rng.randrange(len(weight.dims))
    weight.dims[place] = rng.choice((-weight.dims[place], 0, -1, 1, weight.dims[place] + 1, 2**40, -(2**62)))


def _bytes(model: Any, rng: random.Random) -> None:
    weight = rng.choice(model.graph.initializer)
    weight.raw_data = rng.choice((weight.raw_data[:-4], weight.raw_data + b"1234", weight.raw_data[:-1], b""))


def _dtype(model: Any, rng: random.Random) -> None:
    weight = rng.choice(_network().graph.initializer)
    array = numpy_helper.to_array(weight)
    weight = next(each for each in model.graph.initializer if each.name == weight.name)
    weight.CopyFrom(numpy_helper.from_array(array.astype(rng.choice((np.float64, np.int32, np.float16))), weight.name))
    if rng.random() < 0.3:
        weight.data_type = rng.choice((0, 99, TensorProto.STRING, TensorProto.BFLOAT16))


def _twice(model: Any, rng: random.Random) -> None:
    """Two weights, values or nodes of one name."""
    weight = model.graph.initializer.add()
    weight.CopyFrom(rng.choice(model.graph.initializer))
    weight.raw_data = bytes(len(weight.raw_data))
    if rng.random() < 0.3:
        model.graph.node.add().CopyFrom(rng.choice(model.graph.node))


def _shape(model: Any, rng: random.Random) -> None:
    numbers = rng.choice(([-1, -1], [3, 5], [2, -2], [0, -1], [-1, 64], [2, 2**62], [], [2, 32, 2, -1], [7, -1]))
    model.graph.initializer[4].CopyFrom(numpy_helper.from_array(np.array(numbers, np.int64), "s"))


def _outside(model: Any, rng: random.Random) -> None:
    """A weight lies in another file: one that is missing, too short, a folder, or elsewhere."""
    weight = rng.choice(model.graph.initializer)
    data = weight.raw_data
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    Path("weights.bin").write_bytes(data[: rng.choice((len(data), len(data) - 4, 0))])
    location = rng.choice(("weights.bin", "weights.bin", "missing.bin", "../weights.bin", "/etc/hostname", ".", ""))
    given = {"location": location, "offset": rng.choice((0, 4, -4, 2**40)), "length": rng.choice((len(data), 4, -1, 2**40))}
    for key in rng.sample(list(given), rng.choice((1, 2, 3))):
        entry = weight.external_data.add()
        entry.key, entry.value = key, rng.choice((str(given[key]), str(given[key]), "x"))


def _interface(model: Any, rng: random.Random) -> None:
    """Extents and names of inputs and outputs."""
    value = rng.choice((model.graph.input[0], model.graph.output[0]))
    if rng.random() < 0.4:
        value.name = rng.choice(("x", "y", "v", "w", "nowhere", ""))
        return
    dims = value.type.tensor_type.shape.dim
    if rng.random() < 0.3:
        value.type.tensor_type.ClearField("shape")
    else:
        dims[rng.randrange(len(dims))].dim_value = rng.choice((-1, 0, 1, 7, 2**40, -(2**62)))


def _operator(model: Any, rng: random.Random) -> None:
    node = rng.choice(model.graph.node)
    if rng.random() < 0.3:
        node.domain = rng.choice(("com.microsoft", "ai.onnx", "none.of.these"))
    node.op_type = rng.choice(("Conv", "Relu", "Add", "Clip", "Softmax", "Reshape", "If", "NoSuchOperator", "", "Constant"))


def _opset(model: Any, rng: random.Random) -> None:
    if rng.random() < 0.2:
        del model.opset_import[:]
    for each in model.opset_import:
        each.version = rng.choice((-1, 0, 1, 6, 10, 13, 99, 2**40))


_CHANGES: tuple[Callable[[Any, random.Random], None], ...] = (
    *(_name, _name, _attribute, _attribute, _attribute_type, _extents, _bytes, _dtype, _twice, _shape, _shape, _outside),
    *(_interface, _operator, _opset),
)


# The checker is stricter here than whoever runs models: about operators that it does not know, and extents of outputs.
_LENIENT = {"_operator", "_interface"}


def _valid(path: str) -> bool:
    """Whether onnx's checker, with the inference of shapes, takes a file."""
    try:
        onnx.checker.check_model(path, full_check=True)
    except Exception as error:  # onnx raises errors of many kinds
        return "existing shape differ" in str(error)  # what the graph says of an output; whoever runs models goes on
    return True


def _file_changed(batch: Batch) -> None:
    for seed in batch.each():
        rng, model = batch.random(seed), _network()
        done = []
        for _ in range(rng.choice((1, 1, 1, 2))):
            change = rng.choice(_CHANGES)
            change(model, rng)
            done.append(change.__name__)
        data = model.SerializeToString()
        if rng.random() < 0.1:
            at = rng.randrange(len(data))
            data = rng.choice((data[:at], data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]))
        Path(_FILE).write_bytes(data)
        try:
            answer = call("extract", _FILE, "-o", "-", codes=(0, 2))
        except Exception as error:  # of schedsearch: a traceback, or `Broken`
            batch.failed(seed, f"{done}: {type(error).__name__}: {error}"[:1200])
            continue
        if answer.code == 0 and not _LENIENT & set(done) and not _valid(_FILE):
            batch.failed(seed, f"{done}: the file is read, and onnx's checker refuses it")


SCENARIOS = [
    Scenario(
        "network.file-changed",
        "an ONNX file is changed, mostly so that it is invalid",
        _file_changed,
        share=20.0,
        batch=50,
        short=60,
    ),
]
