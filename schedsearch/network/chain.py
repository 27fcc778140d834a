"""A chain: a node of the model and those behind it that one kernel computes, with everything that the kernel reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Union

from schedsearch.network.facts import FLOATS, INTEGERS, only_reader
from schedsearch.network.graph import Constant
from schedsearch.ops.depthwise_conv1d import MOST_TAPS
from schedsearch.typed import ParamsByName

if TYPE_CHECKING:
    import onnx_ir as ir


Operand = Union["ir.Value", Constant]
_OVER_TIME: Sequence[Sequence[str]] = [], ["bias"], ["silu"], ["bias", "silu"]  # epilogues of depthwise_conv1d
MOST_WHOLE_TAPS = 2**24 // 255**2  # of a depthwise convolution of integers, which GPUs sum in float32, exactly


@dataclass
class Chain:
    """A node and those behind it that one kernel can compute.

    Attributes:
        op, params: of the workload, without its layouts and with the model's dtypes.
        nodes: in order.
        value: the last result.
        stages: the epilogue; its operands are in `arguments`.
        arguments: argument of the workload -> value of the model, or constant.
        scalars: call-time scalar -> number.
        channels, channel_axis: how many channels the result or its slice has, and which of its axes they are.
        offset: the first channel in `value`, if the chain writes a slice of it.
        others: output of the workload -> value of the model, of those behind the first.
        shuffles: arrays whose channels an element-wise chain takes in turn; 0: it is none of `network.shuffles`.
        before: chains of the same nodes whose results this one reads.
    """

    op: str
    params: ParamsByName
    nodes: list[ir.Node]
    value: ir.Value
    arguments: dict[str, Operand]
    stages: list[str | ParamsByName] = field(default_factory=list)
    scalars: dict[str, float] = field(default_factory=dict)
    channels: int = 0
    channel_axis: int = 1
    offset: int | None = None
    others: Mapping[str, ir.Value] = field(default_factory=dict)
    shuffles: int = 0
    before: Sequence[Chain] = ()

    def next(self, taken: set[ir.Node]) -> ir.Node | None:
        """The only node that reads the value, if no chain has it yet."""
        reader = only_reader(self.value)
        return None if reader is None or reader in taken else reader

    def make_depthwise(self) -> None:
        """Makes a conv2d with filters of its own for every channel a depthwise_conv2d."""
        params = self.params
        whole = params["dtype"] in INTEGERS
        if not params["groups"] == params["c"] > 1 or (whole and params["r"] * params["s"] > MOST_WHOLE_TAPS):
            return
        self.op = "depthwise_conv2d"
        self.params = {key: value for key, value in params.items() if key not in ("groups", "k")}
        self.params["multiplier"] = params["k"] // params["c"]

    def make_over_time(self) -> None:
        """Makes a depthwise_conv2d of images and filters of one row a depthwise_conv1d, if that has its epilogue."""
        p = self.params
        if self.op != "depthwise_conv2d" or p["dtype"] not in FLOATS or self.stages not in _OVER_TIME:
            return
        (top, left, bottom, right), (_, stride), (_, dilation) = p["padding"], p["stride"], p["dilation"]
        plain = p["h"] == p["r"] == p["multiplier"] == stride == 1 and not top and not bottom
        if not plain or p["s"] > MOST_TAPS or self.offset is not None:
            return
        self.op = "depthwise_conv1d"
        self.params = {
            "n": p["n"], "c": p["c"], "t": p["w"], "taps": p["s"], "padding": (left, right), "dilation": dilation,
            "dtype": p["dtype"],
        }  # fmt: skip

    def append(
        self,
        node: ir.Node,
        *stages: str | ParamsByName,
        arguments: Mapping[str, Operand] | None = None,
        scalars: Mapping[str, float] | None = None,
    ) -> None:
        """Makes a node that reads `value` part of the chain."""
        self.nodes.append(node)
        self.stages += stages
        self.arguments |= arguments or {}
        self.scalars |= scalars or {}
        self.value = node.outputs[0]


# (node, nodes that belong to a chain already) -> the chain that begins at the node, or why there is none.
Read = Callable[["ir.Node", "set[ir.Node]"], "Chain | str"]
