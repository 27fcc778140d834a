"""Calls and changes that are rare, and must not give other numbers than PyTorch for that."""

from __future__ import annotations

import collections
import contextlib
import copy
import enum
import functools
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: make test-integrations installs it")

from torch_support import Clock, close, db, image, optimize, prepared, ran, small, without_autograd  # noqa: E402, F401

import schedsearch.torch as sst  # noqa: E402
from schedsearch.errors import ArgumentError, DatabaseError, UsageError  # noqa: E402
from schedsearch.torch.layers import kernel_op as calls  # noqa: E402
from schedsearch.torch.models import exported  # noqa: E402
from schedsearch.torch.operators import store  # noqa: E402

pytestmark = [pytest.mark.integrations, pytest.mark.usefixtures("without_autograd")]
nn = torch.nn
functional = torch.nn.functional


# --- Optimized models -------------------------------------------------------------------------------------------------
STRIDED = {
    "every_second": lambda: torch.linspace(-1, 1, 16)[::2],
    "expanded": lambda: torch.ones(1).expand(8),
    "a_column": lambda: torch.arange(16.0).view(8, 2)[:, 1],
}


@pytest.mark.parametrize("name", STRIDED)
@pytest.mark.parametrize("before", [True, False], ids=["before", "afterwards"])
def test_a_bias_with_gaps_in_memory_is_read_rightly(optimize: Any, ran: list[str], name: str, before: bool) -> None:
    model, x = prepared(nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU())), image()
    bias = nn.Parameter(STRIDED[name]())
    if before:
        model[2].bias = bias  # the other layer has the same workload and another bias
    assert len(optimize(model, x).swapped) == 2
    model[2].bias = bias
    ran.clear()
    assert close(model(x), model.forward.original(x)) and ran == ["conv2d", "conv2d"]


def test_a_kernel_that_was_tuned_later_takes_the_place_of_a_default(tmp_path: Path) -> None:
    given = {"db": tmp_path / "records.db", "allow": ("exact", "default")}
    first = sst.optimize_(small(), image(), **given, timer=Clock())
    assert (first.layers[0].level, first.layers[0].record_id) == ("default", None)
    model = small()
    second = sst.optimize_(model, image(), **given, tune=True, trials=3, timer=Clock())
    assert second.layers[0].level == "exact" and second.layers[0].record_id is not None
    (node,) = (each for each in model.forward._plans[0].graph.nodes if each.target is torch.ops.schedsearch.call.default)
    assert calls._find(node.args[0]).kernel.provenance.record_id == second.layers[0].record_id


def test_a_forward_that_wraps_the_optimized_one_runs_without_kernels_once_it_is_reverted(
    optimize: Any,
    ran: list[str],
) -> None:
    model, x = small(), image()
    expected = model(x) + 1
    optimize(model, x)
    inner = model.forward
    model.forward = lambda x: inner(x) + 1
    assert close(model(x), expected)
    sst.revert_(model)
    ran.clear()
    assert torch.equal(model(x), expected) and not ran and "_replicate_for_data_parallel" not in vars(model)


def test_exports_of_several_threads_leave_stderr_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, export = threading.Barrier(2, timeout=2.0), torch.export.export

    def slow(*args: Any, **options: Any) -> Any:
        with contextlib.suppress(threading.BrokenBarrierError):
            inside.wait()  # two at once would meet here, and leave in the order in which they came
        return export(*args, **options)

    monkeypatch.setattr(torch.export, "export", slow)
    before = sys.stderr
    threads = [threading.Thread(target=exported.exported, args=(nn.ReLU(), (torch.ones(2),))) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sys.stderr is before


FORKED = """
import os, sys, torch
import schedsearch.torch as sst

class Clock:
    def ns(self, runs):
        runs[-1]()
        self.asked = not getattr(self, "asked", False)
        return 1000.0 if self.asked else 3000.0

def optimized(*layers):
    model = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 1), *layers).eval().to(memory_format=torch.channels_last)
    x = torch.ones(1, 8, 6, 6).contiguous(memory_format=torch.channels_last)
    return sst.optimize_(model, x, db=sys.argv[1], allow=("default",), timer=Clock()).swapped

torch.set_num_threads(1)  # a child has no other threads
with torch.no_grad():
    assert optimized()
    child = os.fork()
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    os._exit(0 if optimized(torch.nn.ReLU()) else 3)
"""


def test_a_forked_child_may_optimize(db: Path, tmp_path: Path) -> None:
    (tmp_path / "forked.py").write_text(FORKED)
    subprocess.run([sys.executable, tmp_path / "forked.py", db], check=True, timeout=800, cwd=Path(__file__).parents[1])


def test_a_graph_that_counts_its_calls_counts_them_once(db: Path) -> None:
    pytest.importorskip("onnxscript")

    class Counted(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 1)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Any) -> Any:
            self.calls += 1
            return self.conv(x)

    model = prepared(Counted())
    fast = torch.compile(model, backend="schedsearch", options={"db": db, "allow": ("default",), "timer": Clock()})
    fast(image())
    assert model.calls == 1
    fast(image())
    assert model.calls == 2


class Mode(enum.Enum):
    DOUBLE, HALF = 2.0, 0.5


class Head(nn.Module):  # type: ignore[misc, name-defined]
    """A convolution and settings of many kinds, each of which its forward reads."""

    gain = 1.0
    Pair = collections.namedtuple("Pair", "low high")

    def __init__(self) -> None:
        super().__init__()
        self.body = small()
        self.number, self.numbers, self.named, self.mode = 2.0, [1.0, 2.0], {"a": 1.0}, Mode.DOUBLE
        self.ordered, self.pair, self.chosen = collections.OrderedDict(a=1.0), self.Pair(0.0, 1.0), {1}
        self.config, self.array = types.SimpleNamespace(scale=1.0, inner=types.SimpleNamespace(shift=0.0)), np.ones(3)
        self.single, self.part, self.span = np.float32(1), functools.partial(torch.add, alpha=1), slice(0, 3)
        self.recent, self.type = collections.deque([1.0]), "sum"

    def post(self, y: Any) -> Any:
        return y

    def forward(self, x: Any, scale: float = 1.0, *, bias: float = 0.0) -> Any:
        y = self.post(self.body(x)) * self.gain * scale + bias
        y = y * self.number + self.numbers[0] + self.named["a"] + self.mode.value
        y = y + self.ordered["a"] + self.pair.high + len(self.chosen) + self.config.scale + self.config.inner.shift
        return self.rest(y)

    def rest(self, y: Any) -> Any:
        y = y + self.recent[-1] if self.type == "sum" else y
        return self.part(y, float(self.array.sum()) + float(self.single)) + y[..., self.span].mean()


class Constants(Head):
    """The same with what every torch.compile can read."""

    def rest(self, y: Any) -> Any:
        return y


SETTINGS = {
    "an eps": lambda head: setattr(head.body[1], "eps", 5.0),
    "a padding": lambda head: setattr(head.body[0], "padding", (1, 1)),
    "a module": lambda head: head.body.__setitem__(2, nn.Sigmoid()),
    "one module more": lambda head: head.body.append(nn.Tanh()),
    "a number": lambda head: setattr(head, "number", 3.0),
    "an item": lambda head: head.numbers.__setitem__(0, 5.0),
    "a key": lambda head: head.named.__setitem__("a", 5.0),
    "what a class has": lambda head: setattr(head, "gain", 4.0),
    "an attribute of an attribute": lambda head: setattr(head.config.inner, "shift", 3.0),
}
OTHERS = {
    "a method": lambda head: setattr(head, "post", torch.relu),
    "an enum": lambda head: setattr(head, "mode", Mode.HALF),
    "an ordered dictionary": lambda head: head.ordered.__setitem__("a", 5.0),
    "a named tuple": lambda head: setattr(head, "pair", Head.Pair(0.0, 5.0)),
    "a set": lambda head: head.chosen.add(2),
    "an array": lambda head: head.array.__setitem__(0, 5.0),
    "a number of NumPy": lambda head: setattr(head, "single", np.float32(5)),
    "a partial function": lambda head: setattr(head, "part", functools.partial(torch.add, alpha=3)),
    "a deque": lambda head: head.recent.append(2.0),
    "a name of PyTorch's": lambda head: setattr(head, "type", "none"),
    "an array for a number": lambda head: setattr(head, "number", torch.ones(1, 8, 1, 1) * 2),
    "a slice": lambda head: setattr(head, "span", slice(1, 2)),
}


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("name", [*SETTINGS, *OTHERS])
def test_changes_of_settings_are_noticed(optimize: Any, ran: list[str], name: str, copied: bool) -> None:
    head, x = prepared(Head()), image()
    assert optimize(head, x).swapped
    head = copy.deepcopy(head) if copied else head
    ran.clear()
    head(x)
    assert ran == ["conv2d"]
    {**SETTINGS, **OTHERS}[name](head)
    assert torch.equal(head(x), Head.forward(head, x))


def test_a_constant_of_a_class_may_change(optimize: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    head, x = prepared(Head()), image()
    optimize(head, x)
    monkeypatch.setattr(Head, "gain", 4.0)
    assert torch.equal(head(x), Head.forward(head, x))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_compiled_model_is_compiled_again_after_changes(optimize: Any, ran: list[str], name: str) -> None:
    head, x = prepared(Constants()), image()
    optimize(head, x)
    plain = copy.deepcopy(sst.revert_(copy.deepcopy(head)))
    fast = torch.compile(head, backend="aot_eager", fullgraph=True)
    assert close(fast(x), plain(x)) and ran
    for each in (head, plain):
        SETTINGS[name](each)
    ran.clear()
    assert close(fast(x), plain(x)) and not ran


def test_a_compiled_model_reads_weights_of_another_module(optimize: Any, ran: list[str]) -> None:
    model, x = small(), image()
    optimize(model, x)
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    fast(x)
    model[0] = prepared(nn.Sequential(nn.Conv2d(8, 8, 1)))[0]
    nn.init.ones_(model[0].weight)
    assert close(fast(x), model.forward.original(x))


def test_modules_that_are_not_registered_are_left_alone(optimize: Any) -> None:
    class Hidden(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.shown, self.hidden = nn.Conv2d(8, 8, 1), [nn.Conv2d(8, 8, 1)]

        def forward(self, x: Any) -> Any:
            return self.hidden[0](self.shown(x))

    model = prepared(Hidden())
    assert [layer.name for layer in optimize(model, image()).swapped] == ["shown"]
    model.hidden[0].weight = nn.Parameter(torch.ones(8, 8, 1, 1))
    x = image()
    assert close(model(x), functional.conv2d(model.shown(x), torch.ones(8, 8, 1, 1), model.hidden[0].bias))


def test_arguments_may_be_given_by_name(optimize: Any, ran: list[str]) -> None:
    head, x = prepared(Head()), image()
    optimize(head, x)
    for args, named in (((), {"x": x}), ((x, 1.0), {}), ((x,), {"scale": 1.0}), ((), {"scale": 1.0, "x": x, "bias": 0.0})):
        ran.clear()
        assert close(head(*args, **named), Head.forward(head, x)) and ran == ["conv2d"]
    with pytest.warns(UserWarning, match=r"channels_last, 2\.0 runs as before|with strides \(288, 1, 48, 8\), 2\.0 runs"):
        assert torch.equal(head(x, scale=2.0), Head.forward(head, x, 2.0))
    assert torch.equal(head(x, bias=1.0), Head.forward(head, x, bias=1.0))
    with pytest.raises(TypeError, match="unexpected keyword argument 'y'"):
        head(y=x)


def test_a_crop_is_told_to_be_copied(optimize: Any) -> None:
    model, crop = small(), image(1, 8, 12, 12)[:, :, 2:8, 2:8]
    optimize(model, crop)
    with pytest.warns(UserWarning, match=r"an image with gaps in memory has to be copied: x.contiguous\(memory_format"):
        model(crop)


class Noisy(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 1)

    def forward(self, x: Any) -> Any:
        return functional.dropout(self.conv(x), 0.5, training=True)


def test_random_numbers_are_drawn_as_if_nothing_had_been_measured(optimize: Any) -> None:
    model, x = prepared(Noisy()), image()
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    optimize(model, x)
    assert torch.equal(torch.rand(4), expected)


# --- Functions --------------------------------------------------------------------------------------------------------
@pytest.fixture
def functions(db: Path) -> Iterator[None]:
    with sst.use(db, allow=("default",)):
        yield


def layer() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    return image(), torch.randn(8, 8, 1, 1), torch.randn(8)


TRANSFORMED = {
    "conv2d": (
        lambda x, weight, bias: sst.conv2d(x, weight, bias, activation="relu"),
        lambda x, weight, bias: functional.relu(functional.conv2d(x, weight, bias)),
    ),
    "depthwise_conv2d": (
        lambda x, weight, _: sst.depthwise_conv2d(x, weight[:, :1]),
        lambda x, weight, _: functional.conv2d(x, weight[:, :1], groups=8),
    ),
    "pixel_shuffle": (lambda x, *_: sst.pixel_shuffle(x, 2), lambda x, *_: functional.pixel_shuffle(x, 2)),
    "pixel_unshuffle": (lambda x, *_: sst.pixel_unshuffle(x, 2), lambda x, *_: functional.pixel_unshuffle(x, 2)),
    "layout_transform": (lambda x, *_: sst.layout_transform(x, "NCHW", "NHWC"), lambda x, *_: x.permute(0, 2, 3, 1)),
}


@pytest.mark.usefixtures("functions")
@pytest.mark.parametrize("name", TRANSFORMED)
def test_transforms_of_torch_func_give_what_they_give_for_pytorch(name: str) -> None:
    x, *others = layer()
    ours, theirs = (lambda x, each=each: each(x, *others) for each in TRANSFORMED[name])
    tangent = image() * 2
    with torch.enable_grad():
        torch.testing.assert_close(torch.func.jvp(ours, (x,), (tangent,)), torch.func.jvp(theirs, (x,), (tangent,)))
        gradients = [torch.func.grad(lambda x, each=each: each(x).square().sum())(x) for each in (ours, theirs)]
        torch.testing.assert_close(*gradients)
        torch.testing.assert_close(torch.func.vmap(ours)(x[None]), torch.func.vmap(theirs)(x[None]))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        found, right = (torch.autograd.forward_ad.unpack_dual(each(dual)).tangent for each in (ours, theirs))
        torch.testing.assert_close(found, right)


@pytest.mark.usefixtures("functions")
def test_operators_refuse_forward_mode_differentiation() -> None:
    x, weight, _ = layer()
    with torch.autograd.forward_ad.dual_level(), pytest.raises(ArgumentError, match="no rule for forward-mode"):
        torch.ops.schedsearch.conv2d(torch.autograd.forward_ad.make_dual(x, x), weight)
    with pytest.raises(ArgumentError, match="no rule for forward-mode"):
        torch.func.jvp(lambda weight: torch.ops.schedsearch.conv2d(x, weight), (weight,), (weight,))


@pytest.mark.usefixtures("functions")
def test_a_second_derivative_that_is_only_a_part_is_refused() -> None:
    x, weight = image().requires_grad_(), torch.randn(8, 1, 1, 1, requires_grad=True)
    with torch.enable_grad():
        y = sst.depthwise_conv2d(x, weight)
        (dx,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="has no second derivative"):
            torch.autograd.grad(y.sum() + dx.pow(2).sum(), (x, weight))


@pytest.mark.usefixtures("functions")
def test_numbers_may_be_of_any_integral_type_in_any_order() -> None:
    x, weight, bias = layer()
    expected = functional.conv2d(x, weight, bias)
    for one in (True, 1, np.int64(1), torch.tensor(1)):
        for order in ((one, 1), (1, one)):
            for stride in order:
                assert close(sst.conv2d(x, weight, bias, stride=stride, dilation=stride, groups=stride), expected)


MISTAKES = {
    "groups": (lambda x, w, b: sst.conv2d(x, w, groups="2"), "groups is '2'; allowed: an integer"),
    "activation": (lambda x, w, b: sst.conv2d(x, w, activation=["relu"]), r"activation is \['relu'\]; allowed: relu"),
    "no_tensor": (lambda x, w, b: sst.conv2d(None, w), "x is None; allowed: a torch.Tensor"),
    "numpy": (lambda x, w, b: sst.depthwise_conv2d(x, w.numpy()), "weight is a ndarray; allowed: a torch.Tensor"),
    "three_axes": (lambda x, w, b: sst.conv2d(x, w[0], padding="same"), r"weight has shape \(8, 1, 1\); allowed: four axes"),
    "padding": (lambda x, w, b: sst.conv2d(x, w, padding=(1, 1, 1)), r"padding is \(1, 1, 1\); allowed: one integer"),
    "fraction": (lambda x, w, b: sst.conv2d(x, w, stride=1.5), "stride is 1.5; allowed: integers"),
    "shuffle": (lambda x, w, b: sst.conv2d(x, w, pixel_shuffle=-1), "pixel_shuffle is -1; allowed: an integer from 1"),
    "no_factor": (lambda x, w, b: sst.pixel_shuffle(x, 2**70), "upscale_factor is .*; allowed: an integer from 1 to"),
    "out_dtype": (
        lambda x, w, b: sst.quantized_conv2d(x.char(), w.char(), out_dtype="int8"),
        "out_dtype is 'int8'; allowed",
    ),
    "floats_of_integers": (
        lambda x, w, b: sst.quantized_conv2d(x.char(), w.char(), activation="gelu"),
        "activation 'gelu' is of floats, and the sums are integers; allowed: relu, relu6, clip or None",
    ),
    "zero_point": (
        lambda x, w, b: sst.quantized_conv2d(x.char(), w.char(), x_zero_point="a"),
        "x_zero_point is 'a'; allowed: an integer",
    ),
}


@pytest.mark.usefixtures("functions")
@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("gradients", [False, True])
def test_mistakes_say_what_is_allowed(name: str, gradients: bool) -> None:
    call, message = MISTAKES[name]
    x, weight, bias = layer()
    with torch.enable_grad() if gradients else torch.no_grad(), pytest.raises(ArgumentError, match=message):
        call(x, weight, bias)


MISFITS = {
    "bias_of_one": {"bias": torch.ones(1)},
    "bias_with_axes": {"bias": torch.ones(1, 8, 1, 1)},
    "bias_of_another_dtype": {"bias": torch.ones(8, dtype=torch.float64)},
    "scale": {"bias": torch.ones(8), "scale": torch.ones(1)},
    "residual": {"residual": torch.ones(1, 8, 1, 1)},
    "larger_residual": {"residual": torch.ones(3, 2, 8, 6, 6)},
}


@pytest.mark.usefixtures("functions")
@pytest.mark.parametrize("name", MISFITS)
@pytest.mark.parametrize("trained", [False, True])
def test_operands_that_do_not_fit_are_refused_in_training_too(name: str, trained: bool) -> None:
    x, weight, _ = layer()
    for function, kernel in ((sst.conv2d, weight), (sst.depthwise_conv2d, weight[:, :1].contiguous())):
        with torch.enable_grad(), pytest.raises(ArgumentError, match="; allowed: "):
            function(x, kernel.clone().requires_grad_(trained), **MISFITS[name])


@pytest.mark.parametrize(("kernel", "dilation"), [((2, 2), 1), ((3, 4), 3)])
def test_padding_same_is_where_pytorch_puts_it(optimize: Any, kernel: tuple[int, int], dilation: int) -> None:
    """An odd total has one more row or column behind the image than before it. Sums of such numbers are exact."""
    torch.manual_seed(0)
    x, weight = torch.randint(-4, 5, (2, 8, 7, 9)).float(), torch.randint(-4, 5, (8, 8, *kernel)).float()
    exact = functional.conv2d(x.double(), weight.double(), padding="same", dilation=dilation)
    x = x.contiguous(memory_format=torch.channels_last)
    model = nn.Conv2d(8, 8, kernel, padding="same", dilation=dilation, bias=False)
    model.weight.copy_(weight)
    model = prepared(model)
    report = optimize(model, x)
    assert report.swapped and torch.equal(model(x).double(), exact)


def test_descriptions_of_calls_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_MOST_READY", 4)
    with sst.use(None) as used:
        for height in range(1, 9):
            sst.pixel_shuffle(torch.ones(1, 4, height, 1), 2)
        assert len(used.ready) == len(sst.served()) == 4 and "8" in sst.served()[-1].what


def test_databases_that_cannot_be_are_refused_at_once(tmp_path: Path) -> None:
    for given, error, message in (
        ({"db": ""}, UsageError, "db is empty"),
        ({"db": tmp_path}, DatabaseError, "is a folder; give the file"),
        ({"db": 5}, TypeError, r"db is 5 \(int\); allowed: the path"),
        ({"db": tmp_path / "a.db", "allow": 5}, TypeError, r"allow is 5 \(int\); allowed: names of levels"),
    ):
        with pytest.raises(error, match=message):
            sst.use(**given)
    with pytest.raises(TypeError, match=r"model is None; give a torch\.nn\.Module"):
        sst.revert_(None)
