"""ONNX Runtime's own operators of transformers and quantised products: what networks compute, against ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from onnx import helper  # noqa: E402
from test_onnx_products import Arrays, model_of, numbers, operators  # noqa: E402

from schedsearch.network.evaluate import evaluate  # noqa: E402
from schedsearch.network.graph import Network  # noqa: E402
from schedsearch.network.lower import lower  # noqa: E402
from schedsearch.network.model import ModelError, load  # noqa: E402

NONE: Mapping[str, Any] = {}
X = numbers(1, 2, 5, 12)


def integers(seed: int, dtype: Any, *shape: int) -> Any:
    limits = np.iinfo(dtype)
    return np.random.default_rng(seed).integers(limits.min, int(limits.max) + 1, shape).astype(dtype)


def node_of(op: str, names: Sequence[str], outputs: Sequence[str], read: Mapping[str, Any]) -> Any:
    return helper.make_node(op, list(names), list(outputs), domain="com.microsoft", name="it", **read)


def asked(outputs: Sequence[str]) -> list[str]:
    """Without those that nothing reads."""
    return [name for name in outputs if name and not name.startswith("_")]


def model(op: str, names: str, inputs: Arrays, weights: Arrays, outputs: Sequence[str], read: Mapping[str, Any]) -> Any:
    """Args: names: of the node's inputs, with - for one that is missing."""
    given = ["" if name == "-" else name for name in names.split()]
    made = model_of([node_of(op, given, outputs, read)], inputs, weights, asked(outputs))
    made.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return made


def check(
    op: str,
    names: str,
    inputs: Arrays,
    weights: Arrays = NONE,
    outputs: Sequence[str] = ("y",),
    *,
    exact: bool = False,
    **read: Any,
) -> Network:
    runtime = pytest.importorskip("onnxruntime")
    made = model(op, names, inputs, weights, outputs, read)
    session = runtime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    wanted = session.run(None, dict(inputs))
    network = lower(load(made).graph())
    found = evaluate(network, inputs)
    for name, array in zip(asked(outputs), wanted, strict=True):
        assert found[name].shape == array.shape
        if exact:
            np.testing.assert_array_equal(found[name], array)
        else:
            np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5)
    return network


@pytest.mark.parametrize(
    ("op", "names"), [("Gelu", "x"), ("BiasGelu", "x b"), ("FastGelu", "x b"), ("FastGelu", "x"), ("QuickGelu", "x")]
)
def test_activations_are_one_kernel(op: str, names: str) -> None:
    weights = {"b": numbers(2, 12)} if "b" in names.split() else {}
    assert operators(check(op, names, {"x": X}, weights)) == ["elementwise"]


@pytest.mark.parametrize("transposes", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_a_fused_product_reads_transposed_factors_as_they_are(transposes: tuple[int, int]) -> None:
    a, b = numbers(1, *((2, 5, 3) if transposes[0] else (2, 3, 5))), numbers(2, *((2, 7, 5) if transposes[1] else (2, 5, 7)))
    network = check("FusedMatMul", "a b", {"a": a, "b": b}, transA=transposes[0], transB=transposes[1], alpha=0.5)
    assert operators(network) == ["batch_matmul"]


def test_norms_of_sums_give_the_sum_as_well() -> None:
    rows = {name: numbers(number, 12) for number, name in enumerate("gbc")}
    arrays = {"x": X, "s": numbers(2, 2, 5, 12)}
    check("SkipLayerNormalization", "x s g b c", arrays, rows, ("y", "", "", "t"), epsilon=1e-5)
    check("SkipSimplifiedLayerNormalization", "x s g", arrays, {"g": rows["g"]}, ("y", "", "", "t"), epsilon=1e-5)


def test_a_norm_without_a_mean_is_one_of_the_domain_of_onnx() -> None:
    runtime = pytest.importorskip("onnxruntime")
    node = helper.make_node("SimplifiedLayerNormalization", ["x", "g"], ["y"], epsilon=1e-5)
    made = model_of([node], {"x": X}, {"g": numbers(2, 12)}, ["y"])
    (wanted,) = runtime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": X})
    network = lower(load(made).graph())
    np.testing.assert_allclose(evaluate(network, {"x": X})["y"], wanted, rtol=1e-5, atol=1e-6)
    assert operators(network) == ["layer_norm"]


def test_words_positions_and_segments_are_added_and_normalised() -> None:
    ids = {name: integers(number, np.uint8, 2, 5).astype(np.int32) % 2 for number, name in enumerate("ig")}
    tables = {
        "w": numbers(1, 9, 12),
        "p": numbers(2, 8, 12),
        "k": numbers(3, 2, 12),
        "a": numbers(4, 12),
        "b": numbers(5, 12),
    }
    check("EmbedLayerNormalization", "i g w p k a b", ids, tables, ("y", "_mask"), epsilon=1e-5)


@pytest.mark.parametrize("zero", ["", " z"])
def test_weights_of_four_bits_are_those_of_a_dense_layer(zero: str) -> None:
    weights = {"w": integers(1, np.uint8, 7, 2, 8), "s": numbers(2, 14)} | ({"z": integers(3, np.uint8, 7)} if zero else {})
    network = check("MatMulNBits", f"x w s{zero}", {"x": numbers(4, 3, 32)}, weights, K=32, N=7, bits=4, block_size=16)
    assert operators(network) == ["dense"]


@pytest.mark.parametrize("columns", [True, False])
@pytest.mark.parametrize("bias", [" c", " -"])
@pytest.mark.parametrize("made", [" ys yz", ""])
def test_a_quantised_gemm_is_equal_in_every_bit(columns: bool, bias: str, made: str) -> None:
    scale = np.linspace(0.01, 0.02, 7).astype(np.float32) if columns else np.float32(0.013)
    weights: dict[str, Any] = {
        "as": np.float32(0.03), "az": np.uint8(7), "b": integers(1, np.int8, 7, 5), "bs": scale,
        "bz": np.zeros(np.shape(scale), np.int8), "c": integers(2, np.int8, 7).astype(np.int32) * 4,
        "ys": np.float32(0.37), "yz": np.uint8(9),
    }  # fmt: skip
    names = f"a as az b bs bz{bias}{made}".removesuffix(" -")
    weights = {name: weights[name] for name in names.split() if name in weights}
    check("QGemm", names, {"a": integers(3, np.uint8, 3, 5)}, weights, exact=bool(made), transB=1, alpha=1.0)


WEIGHT = {"w": numbers(7, 12, 36) * np.float32(0.3), "b": numbers(8, 36)}
KEYS = {"k": numbers(3, 2, 7, 12), "v": numbers(4, 2, 7, 12)}
PAST = {"pk": numbers(5, 2, 3, 4, 4), "pv": numbers(6, 2, 3, 4, 4)}


def test_one_product_makes_queries_keys_and_values() -> None:
    for unidirectional in (0, 1):
        check("Attention", "x w b", {"x": X}, WEIGHT, num_heads=3, unidirectional=unidirectional)
    parts = {"w": numbers(7, 12, 30) * np.float32(0.3), "b": numbers(8, 30)}
    check("Attention", "x w b", {"x": X}, parts, num_heads=3, qkv_hidden_sizes=[12, 12, 6])
    past = {"past": np.stack([PAST["pk"], PAST["pv"]])}
    check("Attention", "x w b - past", {"x": X, **past}, WEIGHT, ("y", "present"), num_heads=3, unidirectional=1)


def test_heads_have_biases_and_keys_from_before() -> None:
    check("MultiHeadAttention", "q k v b", {"q": X, **KEYS}, {"b": numbers(9, 36)}, num_heads=3)
    check("MultiHeadAttention", "q k v - - ab", {"q": X, **KEYS}, {"ab": numbers(9, 1, 3, 5, 7)}, num_heads=3)
    own = {"q": X, "k": numbers(3, 2, 5, 12), "v": numbers(4, 2, 5, 12)}
    check("MultiHeadAttention", "q k v - - - pk pv", {**own, **PAST}, NONE, ("y", "k2", "v2"), num_heads=3)


EXTRAS: list[dict[str, Any]] = [
    {}, {"do_rotary": 1, "local_window_size": 3}, {"do_rotary": 1, "rotary_interleaved": 1}, {"softcap": 1.5}
]  # fmt: skip


@pytest.mark.parametrize("extra", EXTRAS)
def test_groups_of_heads_share_keys(extra: dict[str, Any]) -> None:
    arrays = {"q": numbers(1, 2, 5, 64), "k": numbers(2, 2, 5, 32), "v": numbers(3, 2, 5, 32)}
    weights = {"l": np.full(2, 4, np.int32), "t": np.array(5, np.int32)}
    tables = {"c": numbers(4, 9, 8), "s": numbers(5, 9, 8)} if "do_rotary" in extra else {}
    names = "q k v - - l t" + " c s" * bool(tables)
    check(
        "GroupQueryAttention", names, arrays, {**weights, **tables}, ("y", "k2", "v2"), num_heads=4, kv_num_heads=2, **extra
    )


def test_rows_are_turned_from_a_position_on() -> None:
    tables = {"c": numbers(4, 9, 4), "s": numbers(5, 9, 4)}
    places = np.array([[0, 1, 2, 3, 4], [2, 3, 4, 5, 6]])
    check("RotaryEmbedding", "x p c s", {"x": numbers(1, 2, 3, 5, 8), "p": places}, tables)
    weights = {**tables, "p": np.array([2])}
    check("RotaryEmbedding", "x p c s", {"x": numbers(1, 2, 5, 24)}, weights, interleaved=1, num_heads=3)


def test_many_layers_of_them_are_replaced_in_order() -> None:
    """Shapes behind each follow from it, also through nodes that compute with shapes."""
    nodes, value = [], "x"
    for number in range(20):
        nodes.append(node_of("FastGelu", [value], [f"g{number}"], {}))
        nodes[-1].name = f"gelu{number}"
        nodes.append(helper.make_node("Shape", [f"g{number}"], [f"s{number}"]))
        nodes.append(helper.make_node("Reshape", [f"g{number}", f"s{number}"], [f"y{number}"]))
        value = f"y{number}"
    made = model_of(nodes, {"x": X}, {}, [value])
    made.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    assert set(operators(lower(load(made).graph()))) == {"elementwise"}


@pytest.mark.parametrize(
    ("op", "names", "inputs", "weights", "read", "said"),
    [
        ("FusedMatMul", "a a", {"a": numbers(1, 2, 3, 3)}, {}, {"transBatchA": 1}, "exchanges axes of the batch"),
        ("Attention", "x w b", {"x": X}, WEIGHT, {"num_heads": 5}, "5 heads and rows of"),
        ("MultiHeadAttention", "q k v", {"q": X, **KEYS}, {}, {"num_heads": 5}, "5 heads for rows of 12"),
        ("MatMulNBits", "x w s", {"x": numbers(4, 3, 32)}, {"w": integers(1, np.uint8, 7, 2, 8), "s": numbers(2, 14)},
         {"K": 32, "N": 7, "bits": 2, "block_size": 16}, "weights of 2 bits"),
        ("GroupQueryAttention", "q k v - - l t", {"q": X, **KEYS, "l": np.full(2, 4, np.int32)},
         {"t": np.array(5, np.int32)}, {"num_heads": 3, "kv_num_heads": 3}, "seqlens_k that are computed"),
    ],
)  # fmt: skip
def test_what_has_no_composition_is_refused_with_the_reason(
    op: str, names: str, inputs: Any, weights: Any, read: Any, said: str
) -> None:
    with pytest.raises(ModelError, match=said) as failed:
        lower(load(model(op, names, inputs, weights, ["y"], read)).graph())
    assert "\n" not in str(failed.value)


def test_masks_of_keys_of_queries_and_lengths() -> None:
    """A key that a mask leaves out counts little, as mask_filter_value says."""
    keys = np.random.default_rng(1).integers(0, 2, (2, 5)).astype(np.int32)
    queries = np.random.default_rng(2).integers(0, 2, (2, 5, 5)).astype(np.int32)
    for mask in (keys, queries, np.array([3, 5], np.int32)):
        check("Attention", "x w b m", {"x": X, "m": mask}, WEIGHT, num_heads=3)
    others = np.random.default_rng(3).integers(0, 2, (2, 7)).astype(np.int32)
    check("MultiHeadAttention", "q k v - m", {"q": X, **KEYS, "m": others}, NONE, num_heads=3)
