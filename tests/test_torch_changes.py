"""Whatever is done to an optimized model, it computes what the same model would that was never optimized.

Each change is made to an optimized model and to a plain copy; in the end `revert_` gives exactly the plain one back.
"""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: make test-integrations installs it")

from torch_support import Residual, close, db, image, optimize, prepared, ran, small, without_autograd  # noqa: E402, F401

import schedsearch.torch as sst  # noqa: E402

pytestmark = [pytest.mark.integrations, pytest.mark.usefixtures("without_autograd")]
nn = torch.nn
functional = torch.nn.functional
Change = Callable[[Any], Any]  # changes a model in place, or returns another


class Block(nn.Module):  # type: ignore[misc, name-defined]
    """A layer that runs twice, a buffer, a plain tensor and numbers that its forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale, self.mean, self.signs = small(), 1.5, torch.full((8, 1, 1), 0.25), [1, -1]
        self.register_buffer("offset", torch.linspace(-1, 1, 8).view(8, 1, 1))

    def forward(self, x: Any) -> Any:
        y = self.body(x)
        for sign in self.signs:
            y = y + sign * self.scale * self.body(y - self.offset)
        return y - self.mean


class Looping(nn.Module):  # type: ignore[misc, name-defined]
    """torch.export cannot read it; its body can be optimized."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small()

    def forward(self, x: Any) -> Any:
        y = self.body(x)
        while y.max() > 1:
            y = y / 2
        return y


MODELS = {"sequential": lambda: nn.Sequential(small()), "block": Block, "looping": Looping}


def layer(model: Any) -> Any:
    """The convolution, its batch norm and its activation."""
    return model[0] if isinstance(model, nn.Sequential) else model.body


def trained(model: Any) -> None:
    with torch.enable_grad():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.train()(image(2, 8, 6, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def halved(model: Any) -> dict[str, Any]:
    return {name: each * 0.5 if each.is_floating_point() else each for name, each in model.state_dict().items()}


def swapped(model: Any) -> None:
    torch.utils.swap_tensors(layer(model)[0].weight, nn.Parameter(layer(model)[0].weight * -2))


def hooked(model: Any) -> None:
    layer(model)[1].register_forward_hook(lambda module, given, y: y * 2)


def unhooked(model: Any) -> None:
    layer(model)[1].register_forward_hook(lambda module, given, y: y * 2).remove()


def reassigned(model: Any) -> None:
    layer(model)[0].weight = nn.Parameter(layer(model)[0].weight.flip(0))


def pruned(model: Any) -> None:
    from torch.nn.utils import prune

    prune.l1_unstructured(layer(model)[0], "weight", amount=0.5)


class Doubled(nn.Module):  # type: ignore[misc, name-defined]
    def forward(self, weight: Any) -> Any:
        return 2 * weight


def parametrised(model: Any) -> None:
    torch.nn.utils.parametrize.register_parametrization(layer(model)[0], "weight", Doubled())


def padded(model: Any) -> None:
    """A border of two pixels, of which one is cut off on each side."""
    layer(model)[0].padding = (1, 1)
    layer(model)[0].stride = (2, 2)
    layer(model).append(nn.Upsample(size=(6, 6)))


class Loud(nn.Conv2d):  # type: ignore[misc, name-defined]
    def forward(self, x: Any) -> Any:
        return 3 * super().forward(x)


# A change, and whether kernels still compute afterwards; None: that depends on the model.
CHANGES: dict[str, tuple[Change, bool | None]] = {
    "nothing": (lambda model: None, True),
    "in place": (lambda model: layer(model)[0].weight.mul_(-2), True),
    "through data": (lambda model: layer(model)[1].running_var.data.add_(1), True),
    "data": (lambda model: setattr(layer(model)[0].weight, "data", layer(model)[0].weight.data * 3), True),
    "assigned": (reassigned, True),
    "a buffer": (lambda model: setattr(layer(model)[1], "running_mean", torch.ones(8)), True),
    "without bias": (lambda model: setattr(layer(model)[0], "bias", None), False),
    "load": (lambda model: model.load_state_dict(halved(model)), True),
    "load by assigning": (
        lambda model: model.load_state_dict(halved(model), assign=True),
        True,
    ),
    "trained": (trained, True),
    "swapped": (swapped, True),
    "half and back": (lambda model: model.half().float(), True),
    "bfloat16 and back": (lambda model: model.bfloat16().float(), True),
    "double": (lambda model: model.double(), False),
    "to the same device": (lambda model: model.to("cpu"), True),
    "contiguous": (lambda model: model.to(memory_format=torch.contiguous_format), True),
    "shared memory": (lambda model: model.share_memory(), True),
    "a gradient": (lambda model: model.requires_grad_(False), True),
    "training and back": (lambda model: model.train().eval(), True),
    "a hook": (hooked, False),
    "a hook that is gone": (unhooked, True),
    "pruned": (pruned, False),
    "parametrised": (parametrised, False),
    "eps": (lambda model: setattr(layer(model)[1], "eps", 0.5), False),
    "padding": (padded, False),
    "class": (lambda model: setattr(layer(model)[0], "__class__", Loud), False),
    "a method": (lambda model: setattr(layer(model)[2], "forward", functional.silu), False),
    "another module": (lambda model: layer(model).__setitem__(2, nn.SiLU()), False),
    "one module more": (lambda model: layer(model).add_module("3", nn.Tanh()), False),
    "one module less": (lambda model: layer(model).__delitem__(2), False),
    "deepcopy": (copy.deepcopy, True),
    "deepcopy of a state": (lambda model: model.load_state_dict(copy.deepcopy(model.state_dict())), True),
    "pickle": (lambda model: pickle.loads(pickle.dumps(model)), False),
    "torch.save": (saved, False),
    "a number": (lambda model: setattr(model, "scale", -0.5), None),
    "a list": (lambda model: getattr(model, "signs", []).append(2), None),
    "a plain tensor": (lambda model: setattr(model, "mean", torch.ones(8, 1, 1)), True),
    "a plain tensor in place": (lambda model: getattr(model, "mean", torch.ones(1)).add_(1), True),
}  # fmt: skip


def alike(model: Any, plain: Any) -> None:
    """Checks that two models compute the same."""
    x = image().to(next(plain.parameters()).dtype)
    assert close(model(x), plain(x))
    assert list(model.state_dict()) == list(plain.state_dict())
    assert all(torch.equal(*pair) for pair in zip(model.state_dict().values(), plain.state_dict().values()))
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]


def both(model: Any, plain: Any, change: Change) -> tuple[Any, Any]:
    torch.manual_seed(3)
    first = change(model)
    torch.manual_seed(3)
    second = change(plain)
    return (first, second) if isinstance(second, nn.Module) else (model, plain)


def reverted(model: Any, plain: Any) -> None:
    """Checks that nothing of `optimize_` is left after `revert_`."""
    assert sst.revert_(model) is model
    for ours, theirs in zip(model.modules(), plain.modules()):
        assert vars(ours).keys() == vars(theirs).keys() and type(ours).__qualname__ == type(theirs).__qualname__
    x = image().to(next(plain.parameters()).dtype)
    assert torch.equal(model(x), plain(x))


def made(name: str, optimize: Any) -> tuple[Any, Any]:
    """An optimized model, and a plain one that is equal."""
    model = prepared(MODELS[name]())
    plain = copy.deepcopy(model)
    assert optimize(model, image()).swapped
    return model, plain


@pytest.mark.filterwarnings("ignore:a call of the optimized")
@pytest.mark.parametrize("called", [False, True], ids=["", "called_before"])
@pytest.mark.parametrize("name", MODELS)
def test_one_change(optimize: Any, ran: list[str], name: str, called: bool) -> None:
    first, other = made(name, optimize)
    for what, (change, serves) in CHANGES.items():
        model, plain = copy.deepcopy(first), copy.deepcopy(other)
        if called:
            alike(model, plain)
        model, plain = both(model, plain, change)
        ran.clear()
        try:
            alike(model, plain)
            assert serves is None or bool(ran) is serves
            reverted(model, plain)
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}") from error


@pytest.mark.filterwarnings("ignore:a call of the optimized")
@pytest.mark.drawn
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", MODELS)
def test_changes_in_any_order(optimize: Any, name: str, seed: int) -> None:
    generator, done = random.Random(f"{name} {seed}"), []
    model, plain = made(name, optimize)
    kept = {"one module less", "one module more", "double", "parametrised", "pruned", "class", "a method", "swapped"}
    names = [what for what in CHANGES if what not in kept]  # the others need what these take away
    for what in generator.choices(names, k=8):
        model, plain = both(model, plain, CHANGES[what][0])
        done.append(what)
        try:
            alike(model, plain)
        except AssertionError as error:
            raise AssertionError(f"after {done}: {error}") from error
    reverted(model, plain)


def test_an_original_and_its_copy_do_not_share_what_changes(optimize: Any) -> None:
    model, plain = made("block", optimize)
    other, plain_other = copy.deepcopy(model), copy.deepcopy(plain)
    for each in (other, plain_other):
        each.mean.add_(1)
        each.signs.append(3)
        each.offset.mul_(2)
    alike(other, plain_other)
    alike(model, plain)


def test_a_bias_that_was_not_there(optimize: Any) -> None:
    model = prepared(Residual())
    plain = copy.deepcopy(model)
    assert optimize(model, image()).swapped
    other = copy.deepcopy(model)
    for each in (model, other, plain):
        each.conv1.bias = nn.Parameter(torch.linspace(-2, 2, 8))
    alike(model, plain)
    alike(other, plain)


def test_kernels_serve_an_equal_module_in_the_place_of_another(optimize: Any, ran: list[str]) -> None:
    model, x = prepared(nn.Sequential(small(), small())), image()
    optimize(model, x)
    model[0] = prepared(copy.deepcopy(model[1]))
    ran.clear()
    assert close(model(x), model.forward.original(x)) and ran
    model[0].extra = 1  # its class has no such name, and nothing reads it
    ran.clear()
    assert close(model(x), model.forward.original(x)) and ran
    model[0].append = None  # it hides a method of its class
    ran.clear()
    assert close(model(x), model.forward.original(x)) and not ran


def test_a_module_with_two_names_that_become_two_modules(optimize: Any, ran: list[str]) -> None:
    shared, x = small(), image()
    model = prepared(nn.Sequential(shared, shared))
    optimize(model, x)
    ran.clear()
    assert close(model(x), model.forward.original(x)) and ran
    model[1] = copy.deepcopy(shared)
    for each in model[1].parameters():
        each.mul_(2)
    ran.clear()
    assert close(model(x), model.forward.original(x)) and not ran


def test_a_part_that_was_saved_is_optimized_again(optimize: Any, ran: list[str]) -> None:
    model, plain = made("looping", optimize)
    whole, both_plain = nn.Sequential(saved(model).body).eval(), nn.Sequential(plain.body).eval()
    assert optimize(whole, image()).swapped
    ran.clear()
    alike(whole, both_plain)
    assert ran
    reverted(whole, both_plain)


def test_a_part_may_be_optimized_before_the_whole(optimize: Any, ran: list[str]) -> None:
    model = prepared(nn.Sequential(small(), nn.Identity()))
    plain = copy.deepcopy(model)
    optimize(model[0], image())
    assert optimize(model, image()).swapped
    ran.clear()
    alike(model, plain)
    assert ran == ["conv2d"]
    reverted(model, plain)


# --- Transforms, graphs for elsewhere ---------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "strict"), [("sequential", False), ("sequential", True), ("block", False)])
def test_exported_programs_are_those_of_the_plain_model(optimize: Any, name: str, strict: bool) -> None:
    model, plain = made(name, optimize)
    x = image()
    program, expected = (torch.export.export(each, (x,), strict=strict) for each in (model, plain))
    assert program.graph_signature == expected.graph_signature
    assert list(program.state_dict) == list(expected.state_dict)
    assert torch.equal(program.module()(x), plain(x))
    assert torch.equal(program.run_decompositions().module()(x), expected.run_decompositions().module()(x))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    assert torch.equal(torch.export.load(file).module()(x), plain(x))
    torch._dynamo.reset()


def test_an_exported_program_may_have_dynamic_shapes(optimize: Any) -> None:
    model, plain = made("sequential", optimize)
    program = torch.export.export(model, (image(2, 8, 6, 6),), dynamic_shapes=({0: torch.export.Dim("n", min=2)},))
    x = image(5, 8, 6, 6)
    assert torch.equal(program.module()(x), plain(x))


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_traced_graphs_are_those_of_the_plain_model(optimize: Any, ran: list[str]) -> None:
    model, plain = made("sequential", optimize)
    ran.clear()
    traced = torch.jit.trace(model, image(), check_trace=False)
    assert torch.equal(traced(image()), plain(image())) and not ran and "schedsearch::" not in str(traced.inlined_graph)


def test_transforms_of_functions_take_pytorch(optimize: Any, ran: list[str]) -> None:
    model, plain = made("sequential", optimize)
    x, tangent, ran[:] = image(), image() * 0.5, []
    batch = torch.stack([x, -x])
    for transform in (
        lambda each: torch.func.jvp(each, (x,), (tangent,))[1],
        lambda each: torch.func.grad(lambda x: each(x).sum())(x),
        lambda each: torch.func.jacrev(lambda x: each(x).mean((0, 2, 3)))(x),
        lambda each: torch.vmap(each)(batch),
    ):
        assert torch.equal(transform(model), transform(plain)) and not ran
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        found, expected = (torch.autograd.forward_ad.unpack_dual(each(dual)).tangent for each in (model, plain))
        assert torch.equal(found, expected) and not ran
    model(x)
    assert ran


def test_parameters_of_functional_call_are_used(optimize: Any, ran: list[str]) -> None:
    model, plain = made("sequential", optimize)
    given = {name: each * 2 for name, each in plain.named_parameters()}
    ran.clear()
    found, expected = (torch.func.functional_call(each, given, (image(),)) for each in (model, plain))
    assert close(found, expected) and ran
    alike(model, plain)


def test_the_signature_of_forward_is_that_of_the_model(optimize: Any) -> None:
    model, plain = made("block", optimize)
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert (model.forward.__name__, model.forward.__code__) == ("forward", Block.forward.__code__)
