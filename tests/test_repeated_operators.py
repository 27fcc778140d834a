"""A repeated call of an operator of PyTorch is not described again, and yet computes with what its tensors are now."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from schedsearch.errors import ArgumentError, UsageError
from schedsearch.runtime import repeated
from schedsearch.runtime.repeated import matcher, quick_matcher, tensor_facts

pytestmark = pytest.mark.integrations


def variants(torch: Any) -> list[Any]:
    """Tensors of few numbers that differ in one thing each, and what is no tensor."""
    plain = torch.arange(6.0).view(2, 3)
    with torch.inference_mode():
        inferred = torch.arange(6.0).view(2, 3)
    return [
        plain, plain.clone(), torch.arange(6.0).view(3, 2), torch.arange(6.0).view(3, 2).t(), plain.double(), plain.int(),
        plain.bfloat16(), torch.arange(12.0).view(2, 6)[:, ::2], torch.arange(6.0), torch.zeros(()), torch.zeros(0, 3),
        torch.zeros(2, 3, dtype=torch.complex64).conj().imag, torch.zeros(2, 3, dtype=torch.complex64).conj(),
        plain.to_sparse(), torch.nn.Parameter(plain.clone()), torch.zeros(2, 3, device="meta"), inferred,
        torch.zeros(1, 2, 3), np.zeros((2, 3), np.float32), None, 3.0,
    ]  # fmt: skip


@pytest.mark.parametrize("quick", [True, False])
def test_tensors_match_only_if_their_facts_do(torch: Any, quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not quick:
        monkeypatch.setattr(repeated, "_guards", lambda: None)
    different = variants(torch)
    known = [each for each in different if isinstance(each, torch.Tensor) and tensor_facts(each) is not None]
    assert len(known) > 10
    for one in known:
        matches = matcher([one])
        for other in different:
            if matches(other):
                assert tensor_facts(other) == tensor_facts(one)
        assert matches(one)
        pair = matcher([torch.zeros(2, 3), one])
        assert pair(torch.ones(2, 3), one) and not pair(torch.ones(3, 2), one) and not pair(None, one)
    twice = matcher([known[0], known[0]])
    assert twice(known[0], known[0]) and twice(known[0], known[1]) and not twice(known[0], known[2])


def test_pytorch_compares_tensors_of_this_version(torch: Any) -> None:
    """Otherwise the facts in Python would serve, in five times the time."""
    assert quick_matcher([torch.zeros(2, 3)]) is not None
    assert quick_matcher([]) is quick_matcher([np.zeros(3)]) is quick_matcher([torch.zeros(2), 1]) is None


@pytest.mark.parametrize("fault", ["missing", "other arguments", "accepts anything"])
def test_another_version_of_pytorch_has_the_facts_in_python(torch: Any, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Anything:
        def __init__(self, *args: object, **named: object) -> None:
            if fault == "other arguments":
                raise TypeError("other arguments")

        def check(self, *args: object) -> bool:
            return True

    if fault == "missing":
        monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    else:
        monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", Anything)
    monkeypatch.setattr(repeated, "_guards", repeated._guards.__wrapped__)
    assert quick_matcher([torch.zeros(2, 3)]) is None
    matches = matcher([torch.zeros(2, 3)])
    assert matches(torch.ones(2, 3)) and not matches(torch.ones(3, 2))


# ---- operators


@pytest.fixture(scope="module")
def sst(torch: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    import schedsearch.torch as package

    with package.use(tmp_path_factory.mktemp("records") / "none.db", allow=("default",)):
        yield package


def layer(torch: Any, n: int = 2) -> tuple[Any, Any]:
    torch.manual_seed(n)
    return tuple(each.to(memory_format=torch.channels_last) for each in (torch.randn(n, 8, 5, 6), torch.randn(8, 8, 1, 1)))


def check(torch: Any, x: Any, weight: Any) -> None:
    exact = torch.nn.functional.conv2d(x.double(), weight.double())
    torch.testing.assert_close(torch.ops.schedsearch.conv2d(x, weight).double(), exact, rtol=1e-5, atol=1e-5)


def noted(torch: Any, weight: Any) -> Any:
    from schedsearch.torch.operators import store

    return store.active.repeated.get(weight.data_ptr())


def test_the_fourth_call_with_a_weight_is_not_described(torch: Any, sst: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from schedsearch.torch.operators import store

    x, weight = layer(torch)
    for _ in range(3):
        assert not noted(torch, weight)
        check(torch, x, weight)
    assert noted(torch, weight)
    monkeypatch.setattr(store.active, "ready", None)  # where descriptions are looked up
    check(torch, x.clone(), weight)
    check(torch, x, weight.mul_(2))


def test_what_changes_between_calls_counts(torch: Any, sst: Any) -> None:
    """Each change meets a noted call of the tensors as they were."""
    other, _ = layer(torch, 3)

    def steps(x: Any, weight: Any) -> Iterator[Any]:
        yield other, weight
        yield x.contiguous(), weight
        x.data = other.clone()
        yield x, weight
        weight.set_(torch.eye(8).view(8, 8, 1, 1).to(memory_format=torch.channels_last))
        yield x, weight
        yield x.new_zeros(2, 8, 9, 9), weight
        yield x[:, :, 1:, 1:], weight
        yield x, torch.ones(8, 8, 3, 3)

    for step in itertools.count():
        x, weight = layer(torch)
        for _ in range(3):
            check(torch, x, weight)
        assert noted(torch, weight)
        changed = next(itertools.islice(steps(x, weight), step, None), None)
        if changed is None:
            break
        check(torch, *changed)
    assert step == 7


def test_a_repeated_call_refuses_what_the_first_one_would(torch: Any, sst: Any) -> None:
    x, weight = layer(torch)
    for _ in range(3):
        check(torch, x, weight)
    assert noted(torch, weight)
    op = torch.ops.schedsearch.conv2d
    with pytest.raises(ArgumentError, match=r"x of torch\.ops\.schedsearch\.conv2d requires a gradient"):
        op(x.clone().requires_grad_(), weight)
    with pytest.raises(ArgumentError, match=r"weight of torch\.ops\.schedsearch\.conv2d requires a gradient"):
        op(x, weight.requires_grad_())
    weight.requires_grad_(False)
    with pytest.raises(ArgumentError, match="conv2d"):
        op(x[:, :4], weight)
    with pytest.raises(ArgumentError, match="x of conv2d has layout"):
        op(x.to_sparse(), weight)
    freed = x.clone()
    freed.untyped_storage().resize_(0)
    with pytest.raises(UsageError, match="has no memory"):
        op(freed, weight)
    negated = torch.view_as_complex(torch.randn(*x.shape, 2)).conj().imag
    assert negated.is_neg()
    check(torch, negated, weight)
    check(torch, x, weight)


def test_another_database_serves_at_once(torch: Any, sst: Any) -> None:
    x, weight = layer(torch)
    for _ in range(3):
        check(torch, x, weight)
    with sst.use(None):
        check(torch, x, weight)
        assert sst.served()[-1].kernel is None
    assert noted(torch, weight)
    sst.refresh()
    assert noted(torch, weight) is None
    check(torch, x, weight)


def test_images_of_several_sizes_share_a_weight(torch: Any, sst: Any) -> None:
    (x, weight), (other, _) = layer(torch), layer(torch, 3)
    for _ in range(8):
        check(torch, x, weight)
        check(torch, other, weight)
    for _ in range(4):
        check(torch, other, weight)
    assert noted(torch, weight)[1](other, weight) is not NotImplemented
    assert noted(torch, weight)[1](x, weight) is NotImplemented
