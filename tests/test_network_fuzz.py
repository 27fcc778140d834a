"""Any change of a valid ONNX model gives a model that is taken, or refused with one message: never another error.

A case is a pure function of its seed. Numbers stay small, so that no case asks other software for much memory or time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

import invalid_models as models
import odd_models
import onnx
from onnx_support import Net

from schedsearch.dynamic.model import read_graph
from schedsearch.errors import SchedsearchError
from schedsearch.network.layers import extract
from schedsearch.network.lower import lower
from schedsearch.network.model import ModelError, read_model

NUMBERS = (-9, -2, -1, 0, 1, 2, 3, 4, 5, 8, 13, 16, 99)
WORDS = ("", "x", "y", "t", "axis", "Relu", "Softmax", "Add", "SAME_UPPER", "VALID", "ai.onnx", "own", "\u00e9", "-1")


def convolutions() -> Any:
    net = Net(1, 4, 8, 8)
    first = net.node("Relu", net.batch_norm(net.conv("x", 8, 4), 8))
    pooled = net.node("MaxPool", first, kernel_shape=[2, 2], strides=[2, 2])
    second = net.node("Clip", net.conv(pooled, 8, 8), net.numbers(0), net.numbers(6))
    both = net.node("Concat", net.node("Add", second, pooled), second, axis=1)
    flat = net.node("Flatten", net.node("GlobalAveragePool", both))
    net.node("Softmax", net.node("Gemm", flat, net.weight("last", 16, 5), net.weight("bias", 5)), axis=1)
    return net.model()


def shapes() -> Any:
    net = Net(2, 6, 4)
    row = net.node("Reshape", "x", net.row(2, -1))
    half = net.node("Slice", row, net.row(0), net.row(12), net.row(1))
    turned = net.node("Transpose", net.node("Unsqueeze", half, net.row(1)), perm=[0, 2, 1])
    picked = net.node("Gather", turned, net.row(0, 3, 5), axis=1)
    net.node("ReduceMean", net.node("Pad", picked, net.row(0, 0, 0, 0, 1, 0)), net.row(2), keepdims=0)
    return net.model()


def quantised() -> Any:
    net = Net(1, 4, 6, 6)
    scale, zero = net.numbers(0.1), net.numbers(3, dtype=np.uint8)
    image = net.node("DequantizeLinear", net.node("QuantizeLinear", "x", scale, zero), scale, zero)
    rows = (net.weight("s", 8, value=0.1), net.weight("z", 8, dtype=np.int8, value=0))
    weight = net.node("DequantizeLinear", net.weight("w", 8, 4, 3, 3, dtype=np.int8), *rows, axis=0)
    net.node("QuantizeLinear", net.node("Conv", image, weight, pads=[1] * 4), scale, zero)
    return net.model()


def bases() -> dict[str, Any]:
    layer = models.model(
        [models.node("LayerNormalization", ["x", "w"], ["t"]), models.node("Gelu", ["t"], ["y"])],
        [models.array(models.EIGHT)],
        opset=20,
    )
    return {
        "convolutions": convolutions(), "shapes": shapes(), "quantised": quantised(), "a layer": layer,
        "a branch": models.branch(models.body([models.node("Relu", ["x"], ["t"])], "t")), "functions": models.nested(3),
        "an argument": odd_models.ODD["an argument of a function"],
        "a constant": models.with_constant(value_floats=[1.0] * 8),
    }  # fmt: skip


BASES = bases()


def places(message: Any) -> Iterator[tuple[Any, Any]]:
    """Every field that is set in a message and the messages inside."""
    for field, value in message.ListFields():
        yield message, field
        if field.message_type is not None:
            for inner in [value] if hasattr(value, "ListFields") else value:
                yield from places(inner)


def changed(seed: int) -> tuple[str, Any]:
    """A model with one to three changes, and the name of the one that it was."""
    chance = random.Random(seed)
    name = chance.choice(list(BASES))
    model = onnx.ModelProto()
    model.CopyFrom(BASES[name])
    for _ in range(chance.randint(1, 3)):
        _change(*chance.choice(list(places(model))), chance)
    return name, model


def _change(message: Any, field: Any, chance: random.Random) -> None:
    value = getattr(message, field.name)
    if hasattr(value, "ListFields"):
        message.ClearField(field.name)
    elif hasattr(value, "append"):
        _change_list(value, field, chance)
    elif chance.random() < 0.2:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, _other(value, field, chance))


def _change_list(values: Any, field: Any, chance: random.Random) -> None:
    place = chance.randrange(len(values))
    way = chance.choice(["drop", "twice", "other", "move"])
    kept = list(values)
    if way == "drop":
        del kept[place]
    elif way == "twice":
        kept.insert(chance.randrange(len(kept) + 1), kept[place])
    elif way == "move":
        kept.insert(chance.randrange(len(kept)), kept.pop(place))
    elif not hasattr(kept[place], "ListFields"):
        kept[place] = _other(kept[place], field, chance)
    copies = [type(each).FromString(each.SerializeToString()) if hasattr(each, "ListFields") else each for each in kept]
    del values[:]
    values.extend(copies)


def _other(value: Any, field: Any, chance: random.Random) -> Any:
    if field.enum_type is not None:
        return chance.choice([each.number for each in field.enum_type.values])
    if isinstance(value, bytes):
        return chance.choice([value[:-1], value + b"\0", b"", value[:-4], b"SAME_UPPER"])
    if isinstance(value, str):
        return chance.choice([*WORDS, value + "2"])
    return chance.choice(NUMBERS) * (1.0 if isinstance(value, float) else 1)


def outcome(seed: int, path: Path) -> str:
    """What came of a case. Raises AssertionError for any error that is not one of ours."""
    name, model = changed(seed)
    path.write_bytes(model.SerializeToString())
    words = []
    readers: dict[str, Callable[[], Any]] = {
        "network": lambda: lower(read_model(path)),
        "layers": lambda: extract(read_model(path)),
        "dynamic": lambda: read_graph(path),
    }
    for what, read in readers.items():
        try:
            read()
            words.append("taken")
        except SchedsearchError as error:
            assert "\n" not in str(error), f"seed {seed} ({name}), {what}: {error}"
            words.append("invalid" if isinstance(error, ModelError) else "refused")
        except Exception as error:
            raise AssertionError(f"seed {seed} ({name}), {what}: {type(error).__name__}: {error}") from error
    return words[0]


@pytest.mark.parametrize("start", range(0, 160, 40))
@pytest.mark.mostly_long(3)
def test_a_changed_model_is_taken_or_refused(start: int, tmp_path: Path) -> None:
    outcomes = {outcome(seed, tmp_path / "net.onnx") for seed in range(start, start + 40)}
    assert outcomes >= {"taken", "invalid"}


@pytest.mark.integrations
def test_what_onnx_runtime_refuses_when_it_loads_a_model_is_refused(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    options, path, refused = onnxruntime.SessionOptions(), tmp_path / "net.onnx", 0
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    for seed in range(200):
        _, model = changed(seed)
        path.write_bytes(model.SerializeToString())
        try:
            lower(read_model(path))
        except SchedsearchError:
            refused += 1
            continue
        onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])  # raises what it refuses
    assert 50 < refused < 190


@pytest.mark.long
@pytest.mark.parametrize("start", range(1000, 4000, 250))
def test_many_changed_models_are_taken_or_refused(start: int, tmp_path: Path) -> None:
    for seed in range(start, start + 250):
        outcome(seed, tmp_path / "net.onnx")
