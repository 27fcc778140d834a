"""Attention, RotaryEmbedding and Einsum as networks of products: against PyTorch, NumPy in float64, and one another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from onnx import helper  # noqa: E402
from test_onnx_products import Arrays, check, lowered, model_of, numbers, operators  # noqa: E402

import schedsearch  # noqa: E402
from schedsearch.network.evaluate import evaluate  # noqa: E402
from schedsearch.network.model import ModelError  # noqa: E402


def attend(inputs: Arrays, weights: Arrays | None = None, *, opset: int = 24, outputs: int = 1, **read: Any) -> Any:
    """What the network of one Attention computes."""
    known = {**inputs, **(weights or {})}
    places = ["q", "k", "v", "mask", "past_key", "past_value", "lengths"]
    names = [name if name in known else "" for name in places]
    while not names[-1]:
        names.pop()
    results = ["y", "present_key", "present_value", "scores"][:outputs]
    network = lowered([helper.make_node("Attention", names, results, **read)], inputs, weights or {}, results, opset=opset)
    values = evaluate(network, inputs)
    return values["y"] if outputs == 1 else [values[name] for name in results]


def of_torch(q: Any, k: Any, v: Any, **options: Any) -> Any:
    torch = pytest.importorskip("torch")
    arrays = [torch.from_numpy(each.astype(np.float64)) for each in (q, k, v)]
    options = {name: torch.from_numpy(each) if isinstance(each, np.ndarray) else each for name, each in options.items()}
    return torch.nn.functional.scaled_dot_product_attention(*arrays, **options).numpy()


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 2), (4, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_heads_share_keys_as_in_pytorch(heads: int, kv_heads: int, causal: bool) -> None:
    q, k, v = numbers(1, 2, heads, 5, 7), numbers(2, 2, kv_heads, 5, 7), numbers(3, 2, kv_heads, 5, 3)
    wanted = of_torch(q, k, v, is_causal=causal, enable_gqa=heads != kv_heads)
    np.testing.assert_allclose(attend({"q": q, "k": k, "v": v}, is_causal=int(causal)), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(5, 9), (1, 5, 9), (3, 1, 9), (2, 1, 5, 9), (2, 3, 5, 9), (1, 1, 1, 9)])
def test_constant_masks_of_any_rank_are_those_of_pytorch(shape: tuple[int, ...]) -> None:
    q, k, v = numbers(1, 2, 3, 5, 7), numbers(2, 2, 3, 9, 7), numbers(3, 2, 3, 9, 7)
    allowed = np.random.default_rng(4).random(shape) < 0.6
    allowed[..., 0] = True
    for mask in (allowed, numbers(5, *shape)):
        wanted = of_torch(q, k, v, attn_mask=mask if mask.dtype == bool else mask.astype(np.float64), scale=0.3)
        found = attend({"q": q, "k": k, "v": v}, {"mask": mask}, scale=0.3)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(9,), (5, 9), (3, 1, 9), (2, 1, 5, 9)])
@pytest.mark.parametrize("causal", [0, 1])
def test_computed_masks_are_constant_ones_and_rows_without_keys_are_zero(shape: tuple[int, ...], causal: int) -> None:
    q, k, v = numbers(1, 2, 3, 5, 7), numbers(2, 2, 3, 9, 7), numbers(3, 2, 3, 9, 7)
    allowed = np.random.default_rng(4).random(shape) < 0.4
    if allowed.ndim > 1:
        allowed[..., 0, :] = False
    for mask in (allowed, np.where(allowed, numbers(5, *shape), np.float32(-np.inf))):
        known = attend({"q": q, "k": k, "v": v}, {"mask": mask}, is_causal=causal)
        found = attend({"q": q, "k": k, "v": v, "mask": mask}, is_causal=causal)
        np.testing.assert_allclose(found, known, rtol=1e-5, atol=1e-6)
        assert np.isfinite(found).all() and (allowed.ndim == 1 or not found[:, :, 0].any())


def test_lengths_that_are_computed_mask_the_keys_behind_them() -> None:
    arrays = {"q": numbers(1, 2, 3, 4, 7), "k": numbers(2, 2, 3, 9, 7), "v": numbers(3, 2, 3, 9, 7)}
    lengths = np.array([6, 2])
    for causal in (0, 1):
        known = attend(arrays, {"lengths": lengths}, is_causal=causal)
        np.testing.assert_allclose(attend({**arrays, "lengths": lengths}, is_causal=causal), known, rtol=1e-5, atol=1e-6)
    rows = arrays["v"][1, :, :2]
    assert not known[1, :, :2].any() and np.allclose(known[1, :, 2], rows[:, 0], atol=1e-6)  # 2 keys of 4 queries


def test_rows_of_heads_that_share_keys_are_rows_of_one_product() -> None:
    arrays = {"q": numbers(1, 2, 6, 5, 7), "k": numbers(2, 2, 2, 9, 7), "v": numbers(3, 2, 2, 9, 7)}
    network = lowered([helper.make_node("Attention", list(arrays), ["y"])], arrays, {}, opset=23)
    assert operators(network) == ["batch_matmul", "softmax", "batch_matmul"]
    first = network.nodes[1].implementations[0]  # behind a view
    assert (first.params["b"], first.params["m"], first.params["weight_layout"]) == (4, 15, "NK")


def test_flat_heads_past_keys_and_scores_are_those_of_four_dimensions() -> None:
    flat = {"q": numbers(1, 2, 5, 12), "k": numbers(2, 2, 4, 6), "v": numbers(3, 2, 4, 10)}
    past = {"past_key": numbers(4, 2, 2, 3, 3), "past_value": numbers(5, 2, 2, 3, 5)}
    heads = {"q": 4, "k": 2, "v": 2}
    split = {
        name: each.reshape(2, -1, heads[name], each.shape[2] // heads[name]).transpose(0, 2, 1, 3)
        for name, each in flat.items()
    }
    for mode in range(4):
        read = {"softcap": 2.0, "qk_matmul_output_mode": mode, "is_causal": 1, "outputs": 4}
        y, *others = attend({**flat, **past}, q_num_heads=4, kv_num_heads=2, **read)
        wanted, *same = attend({**split, **past}, **read)
        np.testing.assert_allclose(y, wanted.transpose(0, 2, 1, 3).reshape(2, 5, 20), rtol=1e-5, atol=1e-6)
        for one, other in zip(others, same, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(others[0], np.concatenate([past["past_key"], split["k"]], 2))


def test_a_network_in_float16_masks_as_one_in_float32() -> None:
    q, k, v = numbers(1, 1, 2, 5, 8), numbers(2, 1, 2, 5, 8), numbers(3, 1, 2, 5, 8)
    network = lowered(
        [helper.make_node("Attention", ["q", "k", "v"], ["y"], is_causal=1)], {"q": q, "k": k, "v": v}, {}, opset=23
    )
    half = {name: each.astype(np.float16) for name, each in (("q", q), ("k", k), ("v", v))}
    found = attend(half, is_causal=1)
    np.testing.assert_allclose(found, evaluate(network, {"q": q, "k": k, "v": v})["y"], rtol=5e-3, atol=5e-3)


# --- Rotations ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("turned", [0, 4])
@pytest.mark.parametrize("flat", [False, True])
def test_pairs_of_numbers_are_turned_as_complex_ones(interleaved: int, turned: int, flat: bool) -> None:
    batch, heads, rows, size = 2, 3, 5, 6
    x, count = numbers(1, batch, heads, rows, size), turned or size
    angles = np.random.default_rng(2).uniform(-3, 3, (11, count // 2)).astype(np.float32)
    positions = np.random.default_rng(3).integers(0, 11, (batch, rows))
    wide = x[..., :count].astype(np.float64)
    pairs = (wide[..., 0::2], wide[..., 1::2]) if interleaved else np.split(wide, 2, axis=-1)
    wanted = (pairs[0] + 1j * pairs[1]) * np.exp(1j * angles.astype(np.float64)[positions])[:, None]
    parts = (wanted.real, wanted.imag)
    made = np.stack(parts, -1).reshape(wide.shape) if interleaved else np.concatenate(parts, -1)
    made = np.concatenate([made, x[..., count:]], -1)
    given = x
    if flat:
        given, made = (each.transpose(0, 2, 1, 3).reshape(batch, rows, heads * size) for each in (x, made))
    read = {"interleaved": interleaved, "rotary_embedding_dim": turned, "num_heads": heads if flat else 0}
    caches = {"cos": np.cos(angles), "sin": np.sin(angles)}
    node = helper.make_node("RotaryEmbedding", ["x", "cos", "sin", "p"], ["y"], **read)
    check([node], {"x": given, "p": positions}, caches, made, opset=23)


# --- Letters ------------------------------------------------------------------------------------------------------------
EQUATIONS = [
    ("ij,jk->ik", [(3, 4), (4, 5)]), ("bhqd,bhkd->bhqk", [(2, 3, 4, 5), (2, 3, 6, 5)]),
    ("bqhd,bkhd->bhqk", [(2, 4, 3, 5), (2, 6, 3, 5)]), ("i,j->ij", [(3,), (4,)]), ("ij->ji", [(3, 4)]), ("ij->", [(3, 4)]),
    ("ii->i", [(4, 4)]), ("ii", [(4, 4)]), ("iij->j", [(3, 3, 2)]), ("...ij,jk->...ik", [(2, 3, 3, 4), (4, 5)]),
    ("...ij,...jk", [(2, 3, 4), (1, 4, 5)]), ("ij,ij->i", [(3, 4), (3, 4)]), ("ij,jk,kl->il", [(2, 3), (3, 4), (4, 5)]),
    ("abc,cd,aed->be", [(2, 3, 4), (4, 5), (2, 6, 5)]), ("bij,bj->bi", [(2, 3, 4), (2, 4)]), ("ij,kj", [(2, 3), (4, 3)]),
    ("i,i->", [(4,), (4,)]), ("BnHW,nm->BmHW", [(2, 3, 4, 5), (3, 6)]), ("ab,ab->ab", [(2, 3), (1, 3)]),
    (" i j , j -> i ", [(2, 3), (3,)]), ("abij,b->aij", [(2, 3, 4, 5), (3,)]), ("i...->...", [(3, 4)]), ("ij->i", [(1, 1)]),
]  # fmt: skip


@pytest.mark.parametrize(("equation", "shapes"), EQUATIONS)
def test_einsum_is_that_of_numpy(equation: str, shapes: list[tuple[int, ...]]) -> None:
    arrays = {f"x{number}": numbers(number, *shape) for number, shape in enumerate(shapes)}
    wanted = np.asarray(np.einsum(equation, *(each.astype(np.float64) for each in arrays.values())))
    for fixed in ("", "x1") if len(arrays) > 1 else ("",):
        inputs = {name: each for name, each in arrays.items() if name != fixed}
        weights = {name: each for name, each in arrays.items() if name == fixed}
        check([helper.make_node("Einsum", list(arrays), ["y"], equation=equation)], inputs, weights, wanted)


# --- Bad input ----------------------------------------------------------------------------------------------------------
Q = {"q": numbers(1, 2, 4, 5, 6), "k": numbers(2, 2, 2, 7, 6), "v": numbers(3, 2, 2, 7, 6)}
FLAT = {"q": numbers(1, 2, 5, 12), "k": numbers(2, 2, 7, 12), "v": numbers(3, 2, 7, 12)}


@pytest.mark.parametrize(
    ("arrays", "read", "said"),
    [
        (Q | {"mask": numbers(4, 1, 2, 4, 5, 7)}, {}, "at most 4 dimensions"),
        (Q | {"mask": numbers(4, 3, 7)}, {}, r"mask of shape \[3, 7\]; allowed: one that can be repeated to \[2, 4, 5, 7\]"),
        (Q | {"mask": numbers(4, 5, 9)}, {}, r"mask of shape \[5, 9\]"),
        (Q | {"k": numbers(2, 2, 3, 7, 6), "v": numbers(3, 2, 3, 7, 6)}, {}, "4 heads of queries and 3 of keys"),
        (Q | {"k": numbers(2, 2, 2, 7, 5)}, {}, "columns of Q and K"),
        (Q | {"v": numbers(3, 2, 2, 8, 6)}, {}, "rows of K and V"),
        (Q | {"past_key": numbers(4, 2, 2, 3, 6)}, {}, "only one of past_key and past_value; allowed: both or none"),
        (Q | {"past_key": numbers(4, 2, 3, 3, 6), "past_value": numbers(5, 2, 3, 3, 6)}, {}, "past_key of shape"),
        (FLAT, {"q_num_heads": 5, "kv_num_heads": 3}, "5 heads and Q of 12 numbers in a row; allowed: a multiple"),
        (FLAT, {"q_num_heads": 4}, "num_heads"),
    ],
)  # fmt: skip
def test_attention_that_does_not_fit_is_refused_in_one_line(arrays: Any, read: Any, said: str) -> None:
    with pytest.raises(ModelError, match=said) as failed:
        attend(arrays, opset=23, **read)
    assert "\n" not in str(failed.value)


@pytest.mark.parametrize(
    ("equation", "shapes", "said"),
    [
        ("ij,jk->ik", [(3, 4)], "arrays, but 1 inputs|[Ii]nput"),
        ("ij->i", [(3, 4, 5)], "a letter for each dimension|does not match the equation"),
        ("ij,jk->ik", [(3, 4), (5, 6)], "4 and 5 for the letter 'j'"),
        ("ij->k", [(3, 4)], "letters of the arrays|label missing"),
        ("i1->i", [(3, 4)], "a letter for each dimension|does not match the equation"),
        ("ij->ii", [(3, 4)], "each once"),
    ],
)  # fmt: skip
def test_an_equation_that_does_not_fit_is_refused_in_one_line(equation: str, shapes: Any, said: str) -> None:
    arrays = {f"x{number}": numbers(number, *shape) for number, shape in enumerate(shapes)}
    with pytest.raises(ModelError, match=said) as failed:
        lowered([helper.make_node("Einsum", list(arrays), ["y"], equation=equation, name="sum")], arrays, {})
    assert "\n" not in str(failed.value)


def test_lengths_that_do_not_fit_in_products_are_refused() -> None:
    for node in (helper.make_node("MatMul", ["a", "b"], ["y"]), helper.make_node("Gemm", ["a", "b"], ["y"])):
        with pytest.raises(ModelError):
            lowered([node], {"a": numbers(1, 3, 4), "b": numbers(2, 5, 6)}, {})


def test_rotations_that_do_not_fit_are_refused() -> None:
    caches = {"cos": numbers(1, 2, 5, 4), "sin": numbers(2, 2, 5, 4)}
    for read in ({"num_heads": 5}, {"num_heads": 2, "rotary_embedding_dim": 3}, {"num_heads": 2, "rotary_embedding_dim": 4}):
        node = helper.make_node("RotaryEmbedding", ["x", "cos", "sin"], ["y"], **read)
        with pytest.raises(ModelError):
            lowered([node], {"x": numbers(3, 2, 5, 16)}, caches, opset=23)


@pytest.mark.long
def test_a_cpu_attends(tmp_path: Any) -> None:
    arrays = {"q": numbers(1, 2, 5, 24), "k": numbers(2, 2, 9, 12), "v": numbers(3, 2, 9, 12)}
    node = helper.make_node("Attention", ["q", "k", "v", "mask"], ["y"], q_num_heads=4, kv_num_heads=2, is_causal=1)
    onnx.save(model_of([node], arrays, {"mask": numbers(4, 5, 9)}, ["y"], opset=23), tmp_path / "net.onnx")
    wanted = attend(arrays, {"mask": numbers(4, 5, 9)}, q_num_heads=4, kv_num_heads=2, is_causal=1)
    with schedsearch.build(tmp_path / "net.onnx", target="cpu", db=tmp_path / "none.db", progress=False) as net:
        np.testing.assert_allclose(net.evaluate(arrays)["y"], wanted, rtol=1e-5, atol=1e-6)
