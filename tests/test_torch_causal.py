"""schedsearch.torch.causal_conv1d against PyTorch in float64: numbers, gradients, orders in memory, packed sequences."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
sst = pytest.importorskip("schedsearch.torch")

from schedsearch.errors import ArgumentError  # noqa: E402

pytestmark = pytest.mark.integrations


@pytest.fixture(params=["kernels", "pytorch"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """By kernels that are built in the first call, and by PyTorch."""
    if request.param == "pytorch":
        with sst.use(None):
            yield request.param
    else:
        with sst.use(tmp_path / "none.db", allow=("default",)):
            yield request.param


def right(x: Any, weight: Any, bias: Any = None, before: Any = None, seq_idx: Any = None, silu: bool = False) -> Any:
    """y in float64; gradients come from PyTorch."""
    x, weight = x.double(), weight.double()
    taps, t = weight.shape[1], x.shape[2]
    start = torch.zeros(*x.shape[:2], taps - 1, dtype=x.dtype) if before is None else before.double()
    padded = torch.cat([start, x], 2)
    y = 0
    for k in range(taps):
        part = padded[:, :, k : k + t]
        if seq_idx is not None:
            earlier = torch.nn.functional.pad(seq_idx, (taps - 1 - k, 0), value=-1)[:, :t]
            part = part * (earlier == seq_idx)[:, None]
        y = y + part * weight[:, k, None]
    y = y if bias is None else y + bias.double()[:, None]
    return torch.nn.functional.silu(y) if silu else y


def tensors(*shapes: tuple[int, ...], grad: bool = False, dtype: Any = None) -> list[Any]:
    generator = torch.Generator().manual_seed(sum(map(sum, shapes)))
    made = [torch.randn(shape, generator=generator).to(dtype or torch.float32) for shape in shapes]
    return [each.requires_grad_(grad) for each in made]


@pytest.mark.parametrize("last", [True, False], ids=["channels last", "time last"])
def test_it_is_the_sum_in_every_order_of_memory(served: str, last: bool) -> None:
    x, weight, bias = tensors((2, 24, 37), (24, 4), (24,))
    x = x.transpose(1, 2).contiguous().transpose(1, 2) if last else x
    y = sst.causal_conv1d(x, weight, bias, activation="silu")
    assert y.stride() == x.stride()
    torch.testing.assert_close(y.double(), right(x, weight, bias, silu=True), rtol=1e-5, atol=1e-5)
    half = sst.causal_conv1d(x[:, 2:20], weight[2:20], None)  # a slice of channels
    torch.testing.assert_close(half.double(), right(x[:, 2:20], weight[2:20]), rtol=1e-5, atol=1e-5)


def test_gradients_are_those_of_the_sum(served: str) -> None:
    given = tensors((2, 8, 21), (8, 4), (8,), (2, 8, 3), grad=True)
    x, weight, bias, before = given
    y, final = sst.causal_conv1d(
        x, weight, bias, initial_states=before, return_final_states=True, activation="silu"
    )  # fmt: skip
    assert torch.equal(final, x[:, :, -3:])
    (dy,) = tensors((2, 8, 21))
    found = torch.autograd.grad((y * dy).sum() + (2 * final).sum(), given)
    twin = [each.detach().double().requires_grad_() for each in given]
    loss = (right(*twin, silu=True) * dy).sum() + (2 * twin[0][:, :, -3:]).sum()
    for ours, theirs in zip(found, torch.autograd.grad(loss, twin)):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


def test_packed_sequences_do_not_see_each_other(served: str) -> None:
    x, weight = tensors((1, 8, 30), (8, 4), grad=True)
    cuts = torch.tensor([0, 1, 12, 14, 30], dtype=torch.int32)
    numbers = torch.repeat_interleave(torch.arange(4, dtype=torch.int32), cuts[1:] - cuts[:-1])[None]
    packed = sst.causal_conv1d(x, weight, seq_idx=numbers)
    assert torch.equal(packed, sst.causal_conv1d(x, weight, cu_seqlens=cuts))
    apart = [sst.causal_conv1d(x[:, :, i:j].contiguous(), weight) for i, j in itertools.pairwise(cuts.tolist())]
    torch.testing.assert_close(packed, torch.cat(apart, 2))
    packed.sum().backward()
    twins = [each.detach().double().requires_grad_() for each in (x, weight)]
    right(*twins, seq_idx=numbers).sum().backward()
    for ours, theirs in zip((x, weight), twins):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-5)


def test_lengths_need_no_kernel_of_their_own(tmp_path: Path) -> None:
    with sst.use(tmp_path / "none.db", allow=("default",)):
        for t in (1, 2, 5, 64, 129):
            x, weight = tensors((1, 16, t), (16, 3))
            torch.testing.assert_close(sst.causal_conv1d(x, weight).double(), right(x, weight), rtol=1e-5, atol=1e-5)
        kernels = [entry.kernel for entry in sst.served() if entry.kernel is not None]
        assert len(kernels) == 5 and len({kernel.artifact.code for kernel in kernels}) <= 2  # one for each order in memory


def test_it_compiles_without_a_break(tmp_path: Path) -> None:
    with sst.use(None):
        x, weight, bias = tensors((1, 8, 16), (8, 4), (8,), grad=True)

        def block(x: Any) -> Any:
            return sst.causal_conv1d(x * 2, weight, bias, activation="silu").sum()

        compiled = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=True)
        for t in (16, 19):
            (x,) = tensors((1, 8, t), grad=True)
            expected = torch.autograd.grad(block(x), [x, weight])
            for ours, theirs in zip(torch.autograd.grad(compiled(x), [x, weight]), expected):
                torch.testing.assert_close(ours, theirs)


def test_a_mistake_in_a_compiled_function_is_named() -> None:
    with sst.use(None):
        x, state, weight = tensors((1, 8), (1, 8, 4), (8, 4))
        for run in (
            lambda: sst.causal_conv1d(x[:, :, None], weight, activation="gelu"),
            lambda: sst.causal_conv1d_update(x, state, weight, activation="gelu"),
        ):
            with pytest.raises(RuntimeError, match="activation is 'gelu'; allowed: None, 'silu' or 'swish'"):
                torch.compile(run, backend="eager", fullgraph=True)()


def test_transforms_are_computed_by_pytorch(served: str) -> None:
    x, weight = tensors((2, 8, 9), (8, 4))
    slopes = torch.func.grad(lambda x: sst.causal_conv1d(x, weight).sum())(x)
    twin = x.double().requires_grad_()
    right(twin, weight).sum().backward()
    torch.testing.assert_close(slopes.double(), twin.grad, rtol=1e-5, atol=1e-5)


def test_autocast_computes_in_its_dtype() -> None:
    x, weight = tensors((1, 8, 16), (8, 4))
    with sst.use(None), torch.autocast("cpu", torch.bfloat16):
        y, state = sst.causal_conv1d(x, weight, return_final_states=True)
        assert y.dtype == state.dtype == torch.bfloat16
        twin = state.float()
        following = [sst.causal_conv1d_update(x[:, :, 0], each, weight) for each in (state, twin)]
        assert following[0].dtype == torch.bfloat16 and torch.equal(*following) and torch.equal(state.float(), twin)
        assert torch.equal(twin[:, :, -1], x[:, :, 0].bfloat16().float()), "a state of another dtype is updated, too"


def test_a_second_derivative_is_refused() -> None:
    with sst.use(None):
        x, weight = tensors((1, 8, 16), (8, 4), grad=True)
        (slope,) = torch.autograd.grad(sst.causal_conv1d(x, weight).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            slope.sum().backward()


def test_decoding_continues_a_sequence(served: str) -> None:
    """Token by token from the final state of a first piece, as the whole at once."""
    x, weight, bias = tensors((3, 16, 12), (16, 4), (16,))
    whole = sst.causal_conv1d(x, weight, bias, activation="silu")
    _, state = sst.causal_conv1d(x[:, :, :5].contiguous(), weight, bias, return_final_states=True)
    for t in range(5, 9):
        version = state._version
        y = sst.causal_conv1d_update(x[:, :, t], state, weight, bias, activation="swish")
        assert state._version > version
        torch.testing.assert_close(y, whole[:, :, t], rtol=1e-5, atol=1e-5)
        assert torch.equal(state, x[:, :, t - 2 : t + 1])
    y = sst.causal_conv1d_update(x[:, :, 9:], state, weight, bias, activation="silu")
    torch.testing.assert_close(y, whole[:, :, 9:], rtol=1e-5, atol=1e-5)


def test_states_may_be_chosen_and_be_rings(served: str) -> None:
    x, weight = tensors((2, 8, 7), (8, 3))
    rings = torch.zeros(4, 8, 5)
    chosen, before = torch.tensor([3, 1], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    whole = sst.causal_conv1d(x, weight)
    for t in range(7):
        y = sst.causal_conv1d_update(x[:, :, t], rings, weight, None, None, before + t, chosen)
        torch.testing.assert_close(y, whole[:, :, t], rtol=1e-5, atol=1e-5)
    for t in range(2, 7):
        assert torch.equal(rings[3, :, t % 5], x[0, :, t])
    assert not rings[0].any() and not rings[2].any()
    held = rings.clone()
    padded = torch.tensor([-1, 1], dtype=torch.int32)
    assert not sst.causal_conv1d_update(x[:, :, 0], rings, weight, None, None, before, padded)[0].any()
    assert torch.equal(rings[[0, 2, 3]], held[[0, 2, 3]])


def test_a_state_that_is_not_contiguous_is_updated(served: str) -> None:
    x, weight = tensors((2, 8), (8, 4))
    state = torch.zeros(2, 3, 8).transpose(1, 2)
    sst.causal_conv1d_update(x, state, weight)
    assert torch.equal(state[:, :, -1], x)


def test_a_state_may_have_any_address(served: str) -> None:
    x, weight = tensors((2, 8), (8, 4))
    state = torch.zeros(2 * 8 * 3 + 1)[1:].view(2, 8, 3)  # not a multiple of 16 bytes
    sst.causal_conv1d_update(x, state, weight)
    assert torch.equal(state[:, :, -1], x)


def test_an_update_compiles(tmp_path: Path) -> None:
    with sst.use(None), torch.no_grad():
        x, weight = tensors((2, 8), (8, 4))
        states = [torch.zeros(2, 8, 3) for _ in range(2)]
        compiled = torch.compile(
            lambda x, state: sst.causal_conv1d_update(x, state, weight) + 1, backend="aot_eager", fullgraph=True
        )
        torch.testing.assert_close(compiled(x, states[0]), sst.causal_conv1d_update(x, states[1], weight) + 1)
        assert torch.equal(*states)


WRONG_UPDATES: list[tuple[dict[str, Any], str]] = [
    (dict(x=torch.zeros(2)), "x has shape"),
    (dict(conv_state=torch.zeros(2, 8, 2)), "conv_state"),
    (dict(conv_state=torch.zeros(1, 8, 3)), "conv_state"),
    (dict(conv_state=torch.zeros(3, 8, 3)), "conv_state"),
    (dict(conv_state=torch.zeros(2, 8, 3, dtype=torch.float16)), "float16"),
    (dict(weight=torch.zeros(8, 4, requires_grad=True)), "no gradients"),
    (dict(cache_seqlens=torch.tensor([3, -1], dtype=torch.int32)), "^cache_seqlens has -1; allowed: at least 0"),
    (dict(cache_seqlens=torch.zeros(2, dtype=torch.int64)), "^cache_seqlens has dtype torch.int64; allowed: torch.int32"),
    (dict(conv_state_indices=torch.zeros(3, dtype=torch.int32)), r"^conv_state_indices has shape \(3,\)"),
    (dict(activation="gelu"), "activation"),
    (dict(conv_state_indices=torch.tensor([0, 2], dtype=torch.int32)), "indices has 2, .* allowed: up to 1"),
    (dict(conv_state_indices=torch.tensor([1, 1], dtype=torch.int32)), "indices has 1 for 2 rows; allowed: another"),
    (dict(conv_state=torch.zeros(1, 8, 3).expand(2, 8, 3)), "elements share memory; allowed: memory for each; clone it"),
]


@pytest.mark.parametrize(
    ("change", "words"), WRONG_UPDATES, ids=[f"{i} {words}" for i, (_, words) in enumerate(WRONG_UPDATES)]
)
def test_mistakes_of_updates_are_named(change: dict[str, Any], words: str) -> None:
    given = {"x": torch.zeros(2, 8), "conv_state": torch.zeros(2, 8, 3), "weight": torch.zeros(8, 4)} | change
    with sst.use(None), pytest.raises(ArgumentError, match=words):
        sst.causal_conv1d_update(**given)


WRONG: list[tuple[dict[str, Any], str]] = [
    (dict(x=torch.zeros(2, 8)), "x has shape"),
    (dict(x=torch.zeros(2, 8, 0)), "0 steps"),
    (dict(x=torch.zeros(2, 8, 5, dtype=torch.float64)), "float64"),
    (dict(weight=torch.zeros(7, 4)), "weight"),
    (dict(weight=torch.zeros(8, 257)), "257 taps"),
    (dict(weight=torch.zeros(8, 1, 4)), r"\(channels, taps\), as conv.weight.squeeze"),
    (dict(bias=torch.zeros(4)), "bias"),
    (dict(bias=torch.zeros(8, dtype=torch.float16)), "bias"),
    (dict(activation="relu"), "activation"),
    (dict(activation="sillu"), "did you mean"),
    (dict(initial_states=torch.zeros(2, 8, 4)), r"^initial_states has shape \(2, 8, 4\); allowed: \(2, 8, 3\)$"),
    (dict(initial_states=torch.zeros(2, 8, 3, dtype=torch.float16)), "^initial_states has dtype torch.float16"),
    (dict(seq_idx=torch.zeros(2, 4, dtype=torch.int32)), "seq_idx"),
    (dict(seq_idx=torch.zeros(2, 5, dtype=torch.int64)), "int64"),
    (dict(seq_idx=torch.tensor([[1, 1, 0, 0, 2]] * 2, dtype=torch.int32)), "decreases"),
    (dict(seq_idx=torch.zeros(2, 5, dtype=torch.int32), return_final_states=True), "return_final_states and packed"),
    (dict(weight=torch.zeros(8, 1), return_final_states=True), "return_final_states is given, but .* no state"),
    (dict(final_states_out=torch.zeros(2, 8, 3)), "final_states_out is given without return_final_states"),
    (dict(cu_seqlens=torch.tensor([0, 5])), "cu_seqlens"),
    (dict(x=torch.zeros(1, 8, 5), cu_seqlens=torch.tensor([1, 5])), "begins with 1 and ends with 5; allowed: from 0"),
    (dict(x=torch.zeros(1, 8, 5), cu_seqlens=torch.tensor([0, 4])), "ends with 4; allowed: from 0 to the 5 steps"),
    (dict(x=torch.zeros(1, 8, 5), cu_seqlens=torch.tensor([0, 3, 2, 5])), "decreases in between; allowed"),
    (dict(dilation=0), "dilation"),
    (dict(weight=None), "weight"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), WRONG, ids=[words for _, words in WRONG])
def test_mistakes_are_named(change: dict[str, Any], words: str) -> None:
    given = {"x": torch.zeros(2, 8, 5), "weight": torch.zeros(8, 4)} | change
    with sst.use(None), pytest.raises(ArgumentError, match=words):
        sst.causal_conv1d(**given)


def test_tensors_without_memory_have_the_shape_of_the_result() -> None:
    x, weight, starts = torch.zeros(1, 8, 5, device="meta"), torch.zeros(8, 4, device="meta"), torch.tensor([0, 2, 5])
    assert sst.causal_conv1d(x, weight).shape == x.shape
    assert sst.causal_conv1d(x, weight, cu_seqlens=starts.to("meta")).shape == x.shape
