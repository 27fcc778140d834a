"""Repeated calls of an operator go around PyTorch's dispatcher, but not where it has more to do than to choose a kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from schedsearch.errors import ArgumentError

pytestmark = pytest.mark.integrations


@pytest.fixture(scope="module")
def sst(torch: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    import schedsearch.torch as package

    with package.use(tmp_path_factory.mktemp("records") / "none.db", allow=("default",)):
        yield package


class Case:
    """A layer whose calls are repeated ones from here on.

    Attributes:
        call: the operator's way around the dispatcher.
        dispatched: how many calls the dispatcher got from it.
    """

    def __init__(self, torch: Any) -> None:
        from schedsearch.torch.operators.convolution import Conv2d
        from schedsearch.torch.operators.repeated_call import around_dispatcher

        torch.manual_seed(0)
        self.x, self.weight = (
            each.to(memory_format=torch.channels_last) for each in (torch.randn(2, 8, 5, 6), torch.randn(8, 8, 1, 1))
        )
        self.exact = torch.nn.functional.conv2d(self.x, self.weight)
        self.dispatched = 0
        self.operator = torch.ops.schedsearch.conv2d
        call = around_dispatcher(Conv2d, self._dispatch)
        assert call is not None
        self.call = call
        for _ in range(4):
            self.operator.default(self.x, self.weight)

    def _dispatch(self, *args: Any, **named: Any) -> Any:
        self.dispatched += 1
        return self.operator._op(*args, **named)

    def way(self, call: Callable[[], Any]) -> str:
        """Which way a call went."""
        before = self.dispatched
        call()
        return "dispatcher" if self.dispatched > before else "around"


@pytest.fixture
def case(torch: Any, sst: Any) -> Case:
    return Case(torch)


def test_a_repeated_call_computes_the_same_without_the_dispatcher(torch: Any, case: Case) -> None:
    results = [case.call(case.x, case.weight), case.call(case.x.clone(), case.weight, None, None, None, "", 0.0, 0.0)]
    assert case.dispatched == 0
    for y in [*results, case.operator(case.x, case.weight)]:
        torch.testing.assert_close(y, case.exact, rtol=1e-4, atol=1e-4)


def test_what_sees_operators_sees_repeated_calls(torch: Any, case: Case) -> None:
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    for mode in (Functions(), Operators()):
        with mode:
            assert case.way(lambda: case.call(case.x, case.weight)) == "dispatcher"
        assert any("schedsearch" in each for each in seen)
        seen.clear()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        case.operator(case.x, case.weight)
    assert "schedsearch::conv2d" in {event.name for event in profile.events()}
    assert case.way(lambda: case.call(case.x, case.weight)) == "around"


def test_traces_have_repeated_calls(torch: Any, case: Case) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    def layer(x: Any, weight: Any) -> Any:
        return case.operator(x, weight) + 1

    for before in (False, True):
        traced = make_fx(layer, pre_dispatch=before)(case.x, case.weight)
        assert "schedsearch.conv2d.default" in [str(node.target) for node in traced.graph.nodes]
    assert case.operator in [node.target for node in torch.fx.symbolic_trace(layer).graph.nodes]
    assert "schedsearch::conv2d" in str(torch.jit.trace(layer, (case.x, case.weight), check_trace=False).graph)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        y = case.operator(mode.from_tensor(case.x), mode.from_tensor(case.weight))
        assert type(y).__name__ == type(case.operator(case.x, case.weight)).__name__ == "FakeTensor"
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(case.x, case.weight), case.exact + 1, rtol=1e-4, atol=1e-4)


def test_gradients_and_transformations_go_through_the_dispatcher(torch: Any, case: Case) -> None:
    with pytest.raises(ArgumentError, match="requires a gradient"):
        case.call(case.x.clone().requires_grad_(), case.weight)
    with pytest.raises(ArgumentError, match="forward-mode"), torch.autograd.forward_ad.dual_level():
        case.call(torch.autograd.forward_ad.make_dual(case.x, case.x), case.weight)
    for mapped in (lambda call: torch.vmap(call, (0, None)), lambda call: torch.func.functionalize(call)):
        outcomes = []
        for call in (case.call, case.operator.default):
            try:
                outcomes.append(mapped(call)(case.x[None], case.weight).shape)
            except Exception as error:
                outcomes.append(type(error))
        assert outcomes[0] == outcomes[1]
    with torch.autocast("cpu", torch.bfloat16):
        assert case.call(case.x, case.weight).dtype is torch.float32


def test_arguments_are_converted_or_refused_as_by_the_dispatcher(torch: Any, case: Case) -> None:
    x, weight = case.x, case.weight
    for args in [(x, weight, None, None, None, "", 0, 0), (x, weight, None, None, None, "", True, 0.0)]:
        assert case.way(lambda: case.call(*args)) == "dispatcher"  # noqa: B023
    assert case.way(lambda: case.call(x, weight=weight)) == "dispatcher"
    wrong: list[tuple[Any, ...]] = [
        (),
        (x,),
        (x, None),
        (x, weight, 1),
        (x, weight, *[None] * 9),
        (x, weight.numpy()),
        (1, weight),
    ]
    for args in wrong:
        texts = []
        for call in (case.operator, case.operator._op):
            with pytest.raises(Exception) as caught:
                call(*args)
            texts.append((caught.type, str(caught.value)))
        assert texts[0] == texts[1]


def test_another_operator_with_the_same_weight_is_told_apart(torch: Any, sst: Any, case: Case) -> None:
    depthwise, x = torch.randn(8, 1, 1, 1), torch.randn(2, 8, 5, 6)
    plain = torch.nn.functional.conv2d
    for _ in range(5):
        y = torch.ops.schedsearch.depthwise_conv2d(x, depthwise)
        torch.testing.assert_close(y, plain(x, depthwise, groups=8), rtol=1e-4, atol=1e-4)
    narrow = torch.randn(2, 1, 5, 6)
    for _ in range(5):
        y = torch.ops.schedsearch.conv2d(narrow, depthwise)
        torch.testing.assert_close(y, plain(narrow, depthwise), rtol=1e-4, atol=1e-4)
        y = torch.ops.schedsearch.depthwise_conv2d(x, depthwise)
        torch.testing.assert_close(y, plain(x, depthwise, groups=8), rtol=1e-4, atol=1e-4)


def test_operators_that_write_to_arguments_or_take_lists_have_no_way_around(torch: Any, sst: Any) -> None:
    from schedsearch.torch.operators import dispatch
    from schedsearch.torch.operators.repeated_call import around_dispatcher

    def leaves(kind: type) -> Iterator[type]:
        yield from (each for child in kind.__subclasses__() for each in leaves(child))
        if "schema" in kind.__dict__:
            yield kind

    kinds: list[Any] = [*leaves(dispatch.Operation)]
    none = {each.name for each in kinds if around_dispatcher(each, lambda: None) is None}
    assert {
        each.name for each in kinds if "!)" in each.schema or "[" in each.schema or "(Tensor, " in each.schema.split("->")[1]
    } <= none
    assert "conv2d" not in none and none


@pytest.mark.parametrize(
    "name", ["_is_torch_function_mode_enabled", "_len_torch_dispatch_stack", "_autograd._profiler_enabled"]
)
def test_a_version_of_pytorch_that_cannot_say_what_sees_a_call_has_no_way_around(
    torch: Any, sst: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from schedsearch.torch.operators.convolution import Conv2d
    from schedsearch.torch.operators.repeated_call import around_dispatcher

    monkeypatch.delattr(f"torch._C.{name}")
    assert around_dispatcher(Conv2d, lambda: None) is None
