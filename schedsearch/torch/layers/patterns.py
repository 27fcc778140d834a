"""Layers in graphs of PyTorch: convolutions with the nodes behind them that an epilogue computes, and pixel shuffles.

`sequences` reads depthwise convolutions over time.

It reads the graphs of torch.export and those that torch.compile gives to its backends; they differ only in how a call is
written. A convolution takes the nodes behind it as long as only one node reads each result.

What a layer returns lies in memory as PyTorch's result does, so that nothing behind it can tell, views least of all. Where
nothing but convolutions could tell, pixel shuffles keep the format of their input: see `_keep_formats`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from schedsearch.errors import UsageError
from schedsearch.ops import STAGES
from schedsearch.torch.layers import sequences
from schedsearch.torch.layers.graph_nodes import (
    DTYPES,
    Layer,
    Norm,
    NoWorkload,
    Refused,
    called,
    name_of,
    padding,
    pair,
    value_of,
    writes,
)
from schedsearch.typed import GivenParams, ParamsByName
from schedsearch.workload import Workload

_LARGEST = torch.finfo(torch.float32).max

_SHUFFLES = ("shuffle", "unshuffle")
_ACTIVATIONS = ("relu", "relu6", "hardtanh", "clip", "leaky_relu", "prelu")  # their results lie in memory as their inputs


def find(graph: fx.Graph, *, tf32: bool = False) -> list[Layer | Refused]:
    """The layers of a graph in order.

    Args:
        graph: of torch.export or torch.compile, with the shape of every value.
        tf32: products of float32 may be computed in TF32.
    """
    _keep_formats(graph)
    order = {node: place for place, node in enumerate(graph.nodes)}
    writers = [place for node, place in order.items() if writes(node)]
    taken: set[fx.Node] = set()
    found: dict[fx.Node, Layer | Refused] = {}
    backwards = [(node, kind) for node in reversed(order) if (kind := called(node)) is not None]
    # Convolutions come first, because they take the shuffles behind them; of two that are added, the later one takes the
    # addition.
    for wanted in (("conv", "conv1d"), _SHUFFLES):
        for node, kind in backwards:
            if kind[0] not in wanted or node in taken or (kind[0] == "conv1d" and not sequences.is_depthwise(kind[1])):
                continue
            try:
                layer: Layer | Refused
                if kind[0] == "conv":
                    layer = _Chain(node, kind[1], order, writers, taken, tf32).read()
                elif kind[0] == "conv1d":
                    layer = sequences.read(node, kind[1], order, writers, taken)
                else:
                    layer = _shuffle(node, kind)
            except NoWorkload as error:
                layer = Refused(name_of(node), str(error))
            except UsageError as error:  # the workload does not exist
                layer = Refused(name_of(node), str(error).splitlines()[0])
            if isinstance(layer, Layer):
                taken.update(layer.nodes)
            found[node] = layer
    return [found[node] for node in order if node in found]


def over_time(graph: fx.Graph) -> list[Layer]:
    """The depthwise convolutions over time that kernels compute, in order."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    writers = [place for node, place in order.items() if writes(node)]
    taken: set[fx.Node] = set()
    found = []
    for node in order:
        kind = called(node)
        if kind is None or kind[0] != "conv1d" or not sequences.is_depthwise(kind[1]):
            continue
        try:
            found.append(sequences.read(node, kind[1], order, writers, taken))
        except (NoWorkload, UsageError):
            continue
        taken.update(found[-1].nodes)
    return found


def _keep_formats(graph: fx.Graph) -> None:
    """Lets pixel shuffles keep the memory format of their input wherever nobody can observe the difference.

    PyTorch's shuffles return contiguous images on a GPU. Convolutions in channels_last copy these before they compute, so
    that a kernel should write channels_last at once. If PyTorch computes the shuffle all the same, the convolution copies.
    """
    for node in graph.nodes:
        kind = called(node)
        if kind is None or kind[0] not in _SHUFFLES:
            continue
        if value_of(node) is None or _is_nhwc(value_of(node)) or not _is_nhwc(value_of(kind[1].get("input"))):
            continue
        for each in _read_by_convolutions(node):
            key = "val" if "val" in each.meta else "example_value"
            value = each.meta[key]
            with value.fake_mode:
                each.meta[key] = torch.empty_like(value, memory_format=torch.channels_last)


def _read_by_convolutions(node: fx.Node) -> list[fx.Node]:
    """The node and the activations behind it, if only convolutions that return channels_last read them; else nothing."""
    reached = [node]
    for each in reached:
        for user in each.users:
            kind, given = called(user) or ("", {})
            if value_of(user) is None or given.get("input") is not each or list(given.values()).count(each) > 1:
                return []
            if kind in _ACTIVATIONS:
                reached.append(user)
            elif kind != "conv" or not _is_nhwc(value_of(user)):
                return []
    return reached


def _is_nhwc(value: Any) -> bool:
    return value is not None and value.dim() == 4 and bool(value.is_contiguous(memory_format=torch.channels_last))


class _Chain:
    """A convolution while it takes the nodes behind it."""

    def __init__(
        self,
        node: fx.Node,
        given: GivenParams,
        order: Mapping[fx.Node, int],
        writers: Iterable[int],
        taken: set[fx.Node],
        tf32: bool,
    ) -> None:
        self.node, self.given, self.order, self.writers, self.taken, self.tf32 = node, given, order, writers, taken, tf32
        self.nodes = [node]
        self.stages: list[Any] = []
        self.arguments: dict[str, fx.Node] = {}
        self.scalars: dict[str, float] = {}
        self.norm: Norm | None = None

    def read(self) -> Layer:
        x, weight = value_of(self.given.get("input")), value_of(self.given.get("weight"))
        params = _conv_params(self.given, x, weight, value_of(self.node), self.tf32)
        self.arguments = {"x": self.given["input"], "weight": self.given["weight"]}
        bias = self.given.get("bias")
        if bias is not None:
            _check_vector(bias, x, value_of(self.node).shape[1])
            self.stages.append("bias")
            self.arguments["bias"] = bias
        depthwise = params["groups"] == params["c"] > 1
        while (follower := self._follower()) is not None:
            stage = self._stage(*follower[1:], depthwise=depthwise)
            if stage is None or (stage in self.stages and not STAGES[str(stage)].repeatable):
                break
            self.stages.append(stage)
            self.nodes.append(follower[0])
        params["epilogue"] = self.stages
        params["layout"], output = _layouts(x, value_of(self.nodes[-1]))
        if output != params["layout"]:
            params["output_layout"] = output
        workload = _depthwise(params) if depthwise else Workload("conv2d", params)
        defaults = {scalar.name: scalar.default for scalar in workload.scalars}
        scalars = {name: number for name, number in self.scalars.items() if defaults[name] != number}
        arguments = {spec.name: self.arguments[spec.name] for spec in workload.signature if spec.name in self.arguments}
        return Layer(name_of(self.node), self.nodes, workload, arguments, self.norm, scalars)

    def _follower(self) -> tuple[fx.Node, str, GivenParams] | None:
        """The only reader of the last value, if its kind matters and nothing in between changes what the layer reads."""
        last = self.nodes[-1]
        if len(last.users) != 1 or "depth_to_space" in map(_name_of_stage, self.stages):
            return None
        (user,) = last.users
        kind = called(user)
        if kind is None or user in self.taken:
            return None
        if (made := value_of(user)) is None or made.dtype != value_of(self.node).dtype:
            return None
        if not (_is_nhwc(made) or made.is_contiguous()):  # no kernel returns that
            return None
        inside = {self.order[each] for each in (*self.nodes, user)}
        between = range(self.order[self.node], self.order[user])
        if any(place in between and place not in inside for place in self.writers):
            return None
        return user, *kind

    def _stage(self, kind: str, given: GivenParams, *, depthwise: bool) -> Any:
        """The stage that computes a node, whose operands are taken; None if there is none."""
        value, last = value_of(self.node), self.nodes[-1]
        if kind in ("relu", "relu6"):
            return "relu" if kind == "relu" else self._clip(0.0, 6.0)
        if kind == "hardtanh":
            return self._clip(given.get("min", -1.0), given.get("max", 1.0))
        if kind == "clip":
            return self._clip(given.get("min"), given.get("max"))
        if kind == "leaky_relu" and "leaky_relu" not in self.stages:
            self.scalars["leaky_relu_slope"] = float(given.get("slope", 0.01))
            return "leaky_relu"
        if kind in ("add", "add_"):
            first, second = given.get("input"), given.get("other")
            other = second if first is last else first
            seen = value_of(other)
            if seen is None or any(getattr(seen, each) != getattr(value, each) for each in ("shape", "dtype", "device")):
                return None
            if given.get("alpha", 1) != 1 or other is last or (kind == "add_" and first is not last):
                return None
            if "residual" not in self.stages:
                self.arguments["residual"] = other
            return "residual"
        if kind == "norm" and given.get("input") is last and self.norm is None:
            self.norm = _norm(given, value)
            return None if self.norm is None else "scale_shift"
        if kind == "shuffle" and given.get("input") is last and not depthwise and value.device.type == "cuda":
            return {"depth_to_space": {"block": int(given["block"]), "mode": "CRD"}}
        return None

    def _clip(self, low: Any, high: Any) -> str | None:
        bounds = -_LARGEST if low is None else low, _LARGEST if high is None else high
        if not all(isinstance(each, int | float) for each in bounds) or "clip" in self.stages:
            return None
        self.scalars |= {"clip_min": float(bounds[0]), "clip_max": float(bounds[1])}
        return "clip"


def _name_of_stage(stage: Any) -> str:
    return stage if isinstance(stage, str) else next(iter(stage))


def _conv_params(given: GivenParams, x: Any, weight: Any, y: Any, tf32: bool) -> ParamsByName:
    if x is None or weight is None or y is None:
        raise NoWorkload("the graph does not say which shapes it has")
    _check_static(x, weight, y)
    if x.dim() != 4:
        raise NoWorkload(f"its input has {x.dim()} dimensions; allowed: 4 (a batch of images)")
    if x.dtype not in DTYPES or weight.dtype != x.dtype:
        raise NoWorkload(f"its input is {x.dtype} and its weight {weight.dtype}; allowed: both float16, bfloat16 or float32")
    (n, c, h, w), (k, _, r, s) = map(int, x.shape), map(int, weight.shape)
    if y.dtype != x.dtype:
        raise NoWorkload(f"its input is {x.dtype} and its output {y.dtype}; allowed: the same (it runs under autocast)")
    dilation = pair(given.get("dilation", 1))
    params: ParamsByName = {
        "n": n, "c": c, "h": h, "w": w, "k": k, "r": r, "s": s, "groups": int(given.get("groups", 1)),
        "stride": pair(given.get("stride", 1)), "dilation": dilation,
        "padding": padding(given.get("padding", 0), (r, s), dilation),
        "dtype": DTYPES[x.dtype],
    }  # fmt: skip
    if tf32 and x.dtype == torch.float32:
        params["precision"] = "tf32"
    return params


def _depthwise(params: ParamsByName) -> Workload:
    if "output_layout" in params:
        raise NoWorkload(
            f"its input is in {params['layout']} and its output in {params['output_layout']}; allowed: the same"
        )
    kept = {key: each for key, each in params.items() if key not in ("groups", "k", "precision")}
    return Workload("depthwise_conv2d", {**kept, "multiplier": params["k"] // params["c"]})


def _shuffle(node: fx.Node, kind: tuple[str, GivenParams]) -> Layer:
    x, y = value_of(kind[1].get("input")), value_of(node)
    if x is None or y is None:
        raise NoWorkload("the graph does not say which shapes it has")
    _check_static(x, y)
    if x.dim() != 4 or x.dtype not in DTYPES:
        raise NoWorkload(f"its input is {x.dtype} with {x.dim()} dimensions; allowed: 4, of floating point")
    layout, output = _layouts(x, y)
    if layout != output:
        raise NoWorkload(f"its input is in {layout} and its output in {output}; allowed: the same")
    n, c, h, w = map(int, x.shape)
    op = {"shuffle": "depth_to_space", "unshuffle": "space_to_depth"}[kind[0]]
    params = {"n": n, "c": c, "h": h, "w": w, "block": int(kind[1]["block"]), "mode": "CRD"}
    workload = Workload(op, {**params, "layout": layout, "dtype": DTYPES[x.dtype]})
    return Layer(name_of(node), [node], workload, {"x": kind[1]["input"]})


def _norm(given: GivenParams, value: Any) -> Norm | None:
    parts: list[Any] = [given.get(name) for name in ("weight", "bias", "mean", "var")]
    is_vector = all(
        (seen := value_of(part)) is not None
        and part.op in ("placeholder", "get_attr")
        and seen.shape == value.shape[1:2]
        and seen.dtype == value_of(parts[0]).dtype
        and seen.device == value.device
        for part in parts
    )
    if given.get("training", False) is not False or not is_vector:
        return None
    weight, bias, mean, var = parts
    return Norm(weight, bias, mean, var, float(given.get("eps", 1e-5)))


def _check_vector(node: Any, x: Any, channels: int) -> None:
    seen = value_of(node)
    if seen is None or seen.dtype != x.dtype or tuple(seen.shape) != (channels,):
        raise NoWorkload(f"its bias is {None if seen is None else seen.dtype}; allowed: {channels} numbers of {x.dtype}")


def _check_static(*values: Any) -> None:
    if not all(isinstance(extent, int) for value in values for extent in (*value.shape, *value.stride())):
        raise NoWorkload("its shape is dynamic; kernels are made for one shape")


def _layouts(x: object, y: object) -> tuple[str, str]:
    """Layouts of an input and an output as they lie in memory; an image of one channel or one pixel has both."""
    ours, theirs = _possible_layouts(x), _possible_layouts(y)
    return next(((each, each) for each in ours if each in theirs), (ours[0], theirs[0]))


def _possible_layouts(value: Any) -> list[str]:
    found = ["NHWC"] * _is_nhwc(value) + ["NCHW"] * bool(value.is_contiguous())
    if not found:
        raise NoWorkload(f"a tensor has strides {tuple(value.stride())}; allowed: those of channels_last or contiguous")
    return found
