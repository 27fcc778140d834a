"""Depthwise convolutions over time in graphs of PyTorch, with what makes them causal and the SiLU behind them.

Models write a causal convolution in two ways: they pad the input on the left, or they let the convolution pad both sides and
cut the end off. Both become the padding of one workload.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from schedsearch.constructors.sequences import depthwise_conv1d
from schedsearch.torch.layers.graph_nodes import DTYPES, Layer, NoWorkload, called, name_of, value_of
from schedsearch.typed import GivenParams

_SEQUENCE = 3  # dimensions: batch, channels, time
_TIME = 2


def is_depthwise(given: GivenParams) -> bool:
    """Whether a convolution over time filters each of several channels on its own."""
    x = value_of(given.get("input"))
    return x is not None and x.dim() == _SEQUENCE and given.get("groups", 1) == x.shape[1] and int(x.shape[1]) > 1


def read(
    node: fx.Node, given: GivenParams, order: Mapping[fx.Node, int], writers: Iterable[int], taken: set[fx.Node]
) -> Layer:
    """The layer of a depthwise convolution over time, with the padding in front of it and the slice and SiLU behind it.

    Args:
        given: its arguments by name.
        order: node -> its place in the graph.
        writers: places of the nodes that may change a tensor.
        taken: nodes of other layers.

    Raises:
        NoWorkload: no kernel computes it.
    """
    return _Reader(node, given, order, writers, taken).read()


class _Reader:
    def __init__(
        self, node: fx.Node, given: GivenParams, order: Mapping[fx.Node, int], writers: Iterable[int], taken: set[fx.Node]
    ) -> None:
        self.node, self.given, self.order, self.writers, self.taken = node, given, order, writers, taken
        self.source: Any = given["input"]
        self.nodes = [node]
        self.stages: list[str] = []

    def read(self) -> Layer:
        x, weight = value_of(self.source), value_of(self.given["weight"])
        taps, dilation = self._checked(x, weight)
        reach = (taps - 1) * dilation
        left, right = _padding(self.given.get("padding", 0), reach)
        before = self._padded_in_front()
        left, right, x = left + before[0], right + before[1], value_of(self.source)
        bias = self.given.get("bias")
        if bias is not None:
            self.stages.append("bias")
        n, c, t = map(int, x.shape)
        right -= self._behind(t + left + right - reach, right)
        layout = self._layout(x)
        workload = depthwise_conv1d(
            n=n, c=c, t=t, taps=taps, dilation=dilation, padding=(left, right), dtype=DTYPES[x.dtype], layout=layout,
            epilogue=self.stages,
        )  # fmt: skip
        arguments = {"x": self.source, "weight": self.given["weight"]} | ({} if bias is None else {"bias": bias})
        last = {"x": "channels last", "y": "channels last"} if layout == "NTC" else {}
        return Layer(name_of(self.node), self.nodes, workload, arguments, views={"weight": "taps", **last})

    def _checked(self, x: Any, weight: Any) -> tuple[int, int]:
        """The taps and the dilation. Raises NoWorkload."""
        y, bias = value_of(self.node), value_of(self.given.get("bias"))
        if weight is None or y is None:
            raise NoWorkload("the graph does not say which shapes it has")
        if not all(isinstance(each, int) for value in (x, weight, y) for each in (*value.shape, *value.stride())):
            raise NoWorkload("its shape is dynamic; kernels are made for one shape")
        formats = {each.dtype for each in (x, weight, y, bias) if each is not None}
        if len(formats) > 1 or x.dtype not in DTYPES:
            named = ", ".join(sorted(str(each) for each in formats))
            raise NoWorkload(f"its tensors are {named}; allowed: all float16, all bfloat16 or all float32")
        (stride,), (dilation,) = (_numbers(self.given.get(name, 1)) for name in ("stride", "dilation"))
        if stride != 1:
            raise NoWorkload(f"its stride over time is {stride}; allowed: 1")
        if weight.shape[0] != x.shape[1]:
            raise NoWorkload(f"it makes {weight.shape[0]} channels of {x.shape[1]}; allowed: as many")
        return int(weight.shape[2]), dilation

    def _padded_in_front(self) -> tuple[int, int]:
        """What a padding of the input adds on both sides, if the convolution can do that itself."""
        kind = called(self.source) if isinstance(self.source, fx.Node) else None
        if kind is None or kind[0] != "pad" or self.source in self.taken:
            return 0, 0
        padding, pads, given = self.source, kind[1].get("pad"), kind[1]
        is_zero = given.get("mode", "constant") == "constant" and (given.get("value") or 0) == 0
        numbers = [each for each in pads or () if isinstance(each, int)]
        if not is_zero or len(numbers) != len(pads or ()) or any(numbers[2:]) or len(numbers) < 2 or min(numbers) < 0:
            return 0, 0
        if value_of(given["input"]) is None or self._is_written(padding, self.node):
            return 0, 0
        self.source = given["input"]
        if len(padding.users) == 1:
            self.nodes.insert(0, padding)
        return numbers[0], numbers[1]

    def _behind(self, steps: int, right: int) -> int:
        """Takes slices that cut the end off, at most `right` steps, and a SiLU; returns the steps that are cut off."""
        cut, value = 0, value_of(self.node)
        while len(self.nodes[-1].users) == 1:
            (user,) = self.nodes[-1].users
            kind, made = called(user), value_of(user)
            if kind is None or user in self.taken or made is None or made.dtype != value.dtype:
                break
            if kind[1].get("input") is not self.nodes[-1] or self._is_written(self.node, user):
                break
            if kind[0] == "silu" and "silu" not in self.stages:
                self.stages.append("silu")
            elif kind[0] in ("slice", "getitem"):
                kept = _kept(kind, steps - cut)
                if kept is None or cut + (steps - cut - kept) > right or made.shape != (*value.shape[:2], kept):
                    break
                cut = steps - kept
            else:
                break
            self.nodes.append(user)
        return cut

    def _is_written(self, first: fx.Node, last: fx.Node) -> bool:
        """Whether a node between two may change what the layer reads."""
        inside = {self.order[each] for each in (*self.nodes, first, last)}
        between = range(self.order[first], self.order[last])
        return any(place in between and place not in inside for place in self.writers)

    def _layout(self, x: torch.Tensor) -> str:
        """NTC if the input lies in memory so, and the result does in PyTorch or nobody can tell."""
        y, last = value_of(self.nodes[-1]), self.nodes[-1]
        if not x.transpose(1, 2).is_contiguous():
            return "NCT"
        return "NTC" if y.transpose(1, 2).is_contiguous() or _is_transposed(last) else "NCT"


def _numbers(given: Any) -> list[int]:
    return [int(each) for each in given] if isinstance(given, Iterable) else [int(given)]


def _padding(given: Any, reach: int) -> tuple[int, int]:
    """Steps in front of and behind the input; `given` is a number, valid or same."""
    if isinstance(given, str):
        total = reach if given == "same" else 0
        return total // 2, total - total // 2
    (both,) = _numbers(given)
    return both, both


def _kept(kind: tuple[str, GivenParams], steps: int) -> int | None:
    """The steps that a slice keeps of `steps`, from the first on; None if it is another slice."""
    given = kind[1]
    if kind[0] == "slice":
        axis, cut = int(given.get("dim", 0)) % _SEQUENCE, slice(given.get("start"), given.get("end"), given.get("step", 1))
        cuts = {axis: cut}
    else:
        index = given["index"] if isinstance(given["index"], tuple) else (given["index"],)
        if Ellipsis in index:
            place = index.index(Ellipsis)
            index = (*index[:place], *[slice(None)] * (_SEQUENCE + 1 - len(index)), *index[place + 1 :])
        cuts = dict(enumerate(index))
    numbers = [each for cut in cuts.values() if isinstance(cut, slice) for each in (cut.start, cut.stop, cut.step)]
    if not all(isinstance(cut, slice) for cut in cuts.values()) or not all(isinstance(n, int | None) for n in numbers):
        return None
    first, end, step = cuts.get(_TIME, slice(None)).indices(steps)
    return end if (first, step) == (0, 1) and end > 0 else None  # the caller compares the other axes


def _is_transposed(node: fx.Node) -> bool:
    """Whether all that read a value bring the channels last before anything else, and none of them is a result."""

    def turns(user: fx.Node) -> bool:
        kind, given = called(user) or ("", {})
        order: list[int] = []
        if kind == "transpose":
            order = sorted(int(given[name]) % _SEQUENCE for name in ("dim0", "dim1") if isinstance(given.get(name), int))
        elif kind == "permute" and isinstance(given.get("dims"), list | tuple):
            order = [int(each) % _SEQUENCE for each in given["dims"]]
        return order in ([1, 2], [0, 2, 1]) and all(each.op != "output" for each in user.users)

    return bool(node.users) and all(map(turns, node.users))
