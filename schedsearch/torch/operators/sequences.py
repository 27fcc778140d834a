"""Depthwise convolutions over time and their gradients as operators of PyTorch.

Tensors are contiguous in the order of their axes: x and y are (n, t, c) or (n, c, t) as the layout says, states (n, c, t).
Kernels take every length (`Template.reuse`), so they are built where no record has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from schedsearch.constructors.sequences import causal_conv1d_update, depthwise_conv1d
from schedsearch.errors import ArgumentError
from schedsearch.torch.operators.dispatch import Operation, declared
from schedsearch.torch.operators.formats import dtype_name
from schedsearch.torch.operators.library import eager
from schedsearch.workload import Workload

MOST_TAPS = 256
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
# Tensor of an operator -> the argument of `causal_conv1d` or `causal_conv1d_update` that messages name.
_SPOKEN = {"initial_state": "initial_states", "indices": "conv_state_indices", "positions": "cache_seqlens"}


ACTIVATIONS = (None, "silu", "swish")


def parameters_text(layout: str, activation: str | None, final_state: bool, dilation: int) -> str:
    """The parameters of an operator as it takes them. Another activation than ours is left to the operator to refuse."""
    silu = str(int(activation is not None)) if activation in ACTIVATIONS else f"?{activation}".replace(",", " ")
    return f"{layout},{silu},{int(final_state)},{dilation}"


def _has_silu(text: str) -> bool:
    if text.startswith("?"):
        raise ArgumentError(f"activation is {text[1:]!r}; allowed: None, 'silu' or 'swish'")
    return text == "1"


@dataclass(frozen=True)
class _Sequences(Operation):
    """A causal convolution or its gradients.

    Attributes:
        layout: NTC or NCT.
        silu: whether the activation follows.
        final_state: whether the last inputs are an output.
        dilation: steps between taps.
    """

    builds: ClassVar[bool] = True
    layout: str
    silu: bool
    final_state: bool
    dilation: int

    @classmethod
    def of(cls, *args: Any) -> _Sequences:
        layout, silu, final_state, dilation = args[-1].split(",")
        return cls(layout, _has_silu(silu), final_state == "1", int(dilation))

    def sizes(self, given: Mapping[str, torch.Tensor]) -> tuple[Any, Any, Any, Any]:
        """Batch, channels, steps and taps."""
        x = given["x"]
        channels, steps = (2, 1) if self.layout == "NTC" else (1, 2)
        return x.shape[0], x.shape[channels], x.shape[steps], given["weight"].shape[1]

    def check(self, given: Mapping[str, torch.Tensor]) -> None:
        x, weight = given["x"], given["weight"]
        _check_shape("x", x, (None, None, None))
        n, c, t, taps = self.sizes({"x": x, "weight": _checked_weight(weight)})
        if t < 1:
            raise ArgumentError(f"x has {t} steps; allowed: at least 1")
        state = (n, c, (taps - 1) * self.dilation)
        shapes = {"weight": (c, taps), "bias": (c,), "dy": tuple(x.shape), "initial_state": state, "d_final_state": state,
                  "seq_idx": (n, t)}  # fmt: skip
        for name, tensor in given.items():
            if name != "x":
                _check_shape(name, tensor, shapes[name])
            like = torch.int32 if name == "seq_idx" else weight.dtype if name == "bias" else x.dtype
            if name == "weight" and tensor.dtype in FLOATS:
                continue
            if tensor.dtype != like or (name != "seq_idx" and tensor.dtype not in FLOATS):
                allowed = f"{like}" if like in FLOATS or name == "seq_idx" else "float16, bfloat16 or float32"
                raise ArgumentError(f"{_spoken(name)} has dtype {tensor.dtype}; allowed: {allowed}; convert it")
        states = "initial_states" if "initial_state" in given else "return_final_states" if self.final_state else ""
        if "seq_idx" in given and states:
            raise ArgumentError(
                f"{states} and packed sequences are given; allowed: states without seq_idx or cu_seqlens, because packed "
                "sequences have no common start or end"
            )
        if not state[2] and states:
            raise ArgumentError(f"{states} is given, but a convolution of a single tap has no state; leave it out")

    def workload(self, given: Mapping[str, torch.Tensor]) -> Workload:
        n, c, t, taps = self.sizes(given)
        stages = [*(["bias"] if "bias" in given else []), *(["silu"] if self.silu else [])]
        return depthwise_conv1d(
            n=n, c=c, t=t, taps=taps, dilation=self.dilation, dtype=dtype_name(given["x"].dtype),
            weight_dtype=dtype_name(given["weight"].dtype), layout=self.layout, epilogue=stages,
            initial_state="initial_state" in given, final_state=self.final_state, seq_idx="seq_idx" in given,
            direction="backward" if "dy" in given else "forward",
        )  # fmt: skip

    def windows(self, given: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """What each tap reads, (n, c, t) in float32."""
        x = self.by_channels(given["x"]).float()
        n, c, t, taps = self.sizes(given)
        reach = (taps - 1) * self.dilation
        before = given["initial_state"].float() if "initial_state" in given else x.new_zeros(n, c, reach)
        padded, found = torch.cat([before, x], 2), []
        for k in range(taps):
            part = padded[:, :, k * self.dilation : k * self.dilation + t]
            found.append(part if (mask := self.mask(given, k)) is None else part.where(mask, 0.0))
        return found

    def mask(self, given: Mapping[str, torch.Tensor], k: int) -> torch.Tensor | None:
        """Whether a tap reads the sequence of its step, (n, 1, t); None without sequences."""
        if "seq_idx" not in given:
            return None
        numbers, shift = given["seq_idx"], (given["weight"].shape[1] - 1 - k) * self.dilation
        earlier = torch.nn.functional.pad(numbers, (shift, 0), value=-1)[:, : numbers.shape[1]]
        return (earlier == numbers)[:, None]

    def by_channels(self, tensor: torch.Tensor) -> torch.Tensor:
        """As (n, c, t), or back."""
        return tensor.transpose(1, 2) if self.layout == "NTC" else tensor

    def sums(self, given: Mapping[str, torch.Tensor], windows: list[torch.Tensor]) -> torch.Tensor:
        """z, (n, c, t) in float32."""
        weight = given["weight"].float()
        total = sum(window * weight[:, k, None] for k, window in enumerate(windows))
        assert isinstance(total, torch.Tensor)
        return total + given["bias"].float()[:, None] if "bias" in given else total


def _spoken(name: str) -> str:
    return _SPOKEN.get(name, name)


def _check_shape(name: str, tensor: torch.Tensor, shape: tuple[Any, ...]) -> torch.Tensor:
    """Raises ArgumentError if a tensor has another shape; None stands for any extent."""
    if tensor.dim() != len(shape) or any(want is not None and have != want for have, want in zip(tensor.shape, shape)):
        allowed = f"{len(shape)} axes" if None in shape else f"{tuple(shape)}"
        raise ArgumentError(f"{_spoken(name)} has shape {tuple(tensor.shape)}; allowed: {allowed}")
    return tensor


def _checked_weight(weight: torch.Tensor) -> torch.Tensor:
    """Raises ArgumentError unless it is (channels, taps)."""
    if weight.dim() == 3 and weight.shape[1] == 1:
        shape = tuple(weight.shape)
        raise ArgumentError(f"weight has shape {shape}; allowed: (channels, taps), as conv.weight.squeeze(1)")
    _check_shape("weight", weight, (None, None))
    if not 1 <= weight.shape[1] <= MOST_TAPS:
        raise ArgumentError(f"weight has {weight.shape[1]} taps; allowed: 1 to {MOST_TAPS}")
    return weight


@dataclass(frozen=True)
class _Forward(_Sequences):
    def _y(self, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return torch.empty(given["x"].shape, dtype=given["x"].dtype, device=given["x"].device)

    def _plain_y(self, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        z = self.sums(given, self.windows(given))
        y = torch.nn.functional.silu(z) if self.silu else z
        return self.by_channels(y).to(given["x"].dtype).contiguous()


@declared
@dataclass(frozen=True)
class CausalConv1d(_Forward):
    """y."""

    schema: ClassVar[str] = (
        "causal_conv1d(Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, Tensor? seq_idx, str parameters) "
        "-> Tensor"
    )

    def empty(self, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._y(given)

    def plain(self, given: Mapping[str, torch.Tensor], scalars: Mapping[str, float]) -> torch.Tensor:
        return self._plain_y(given)


@declared
@dataclass(frozen=True)
class CausalConv1dStates(_Forward):
    """y and the final state."""

    schema: ClassVar[str] = (
        "causal_conv1d_states(Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, Tensor? seq_idx, "
        "str parameters) -> (Tensor, Tensor)"
    )

    def empty(self, given: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        n, c, _, taps = self.sizes(given)
        return self._y(given), given["x"].new_empty(n, c, (taps - 1) * self.dilation)

    def plain(self, given: Mapping[str, torch.Tensor], scalars: Mapping[str, float]) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.by_channels(given["x"])
        n, c, _, taps = self.sizes(given)
        reach = (taps - 1) * self.dilation
        before = given["initial_state"] if "initial_state" in given else x.new_zeros(n, c, reach)
        return self._plain_y(given), torch.cat([before, x], 2)[:, :, -reach:].contiguous()


@declared
@dataclass(frozen=True)
class CausalConv1dBackward(_Sequences):
    """dx, dw, then db with a bias, and the gradient of the initial state if there is one."""

    schema: ClassVar[str] = (
        "causal_conv1d_backward(Tensor x, Tensor weight, Tensor? bias, Tensor dy, Tensor? initial_state, "
        "Tensor? d_final_state, Tensor? seq_idx, str parameters) -> Tensor[]"
    )

    def empty(self, given: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        like = [given[name] for name in ("x", "weight", "bias", "initial_state") if name in given]
        return [torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in like]

    def plain(self, given: Mapping[str, torch.Tensor], scalars: Mapping[str, float]) -> list[torch.Tensor]:
        windows, dz = self.windows(given), self.by_channels(given["dy"]).float()
        weight = given["weight"].float()
        if self.silu:
            z = self.sums(given, windows)
            gate = torch.sigmoid(z)
            dz = dz * gate * (1 + z * (1 - gate))
        n, c, t, taps = self.sizes(given)
        reach = (taps - 1) * self.dilation
        d_padded = dz.new_zeros(n, c, reach + t)
        if "d_final_state" in given:
            d_padded[:, :, t:] += given["d_final_state"].float()
        for k in range(taps):
            part = dz * weight[:, k, None]
            mask = self.mask(given, k)
            d_padded[:, :, k * self.dilation : k * self.dilation + t] += part if mask is None else part.where(mask, 0.0)
        found = {
            "x": self.by_channels(d_padded[:, :, reach:]),
            "weight": torch.stack([(dz * window).sum((0, 2)) for window in windows], 1),
            "bias": dz.sum((0, 2)),
            "initial_state": d_padded[:, :, :reach],
        }
        return [found[name].to(given[name].dtype).contiguous() for name in found if name in given]


@declared
@dataclass(frozen=True)
class CausalConv1dUpdate(Operation):
    """y of new steps; the states are updated in place.

    Attributes:
        layout: of x and y.
        silu: whether the activation follows.
    """

    schema: ClassVar[str] = (
        "causal_conv1d_update(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) conv_state, Tensor? indices, "
        "Tensor? positions, str parameters) -> Tensor"
    )
    in_place: ClassVar[Mapping[str, str]] = {"state": "conv_state"}
    builds: ClassVar[bool] = True
    layout: str
    silu: bool

    @classmethod
    def of(cls, *args: Any) -> CausalConv1dUpdate:
        layout, silu, _, _ = args[-1].split(",")
        return cls(layout, _has_silu(silu))

    def tensor_of(self, argument: str) -> str:
        return "conv_state" if argument == "state_before" else argument

    def sizes(self, given: Mapping[str, torch.Tensor]) -> tuple[Any, Any, Any, Any]:
        """Batch, channels, steps and taps."""
        x = given["x"]
        channels, steps = (2, 1) if self.layout == "NTC" else (1, 2)
        return x.shape[0], x.shape[channels], x.shape[steps], given["weight"].shape[1]

    def check(self, given: Mapping[str, torch.Tensor]) -> None:
        x, state = _check_shape("x", given["x"], (None, None, None)), given["conv_state"]
        _checked_weight(given["weight"])
        _check_shape("conv_state", state, (None, None, None))
        n, c, t, taps = self.sizes(given)
        if t < 1 or n < 1:
            raise ArgumentError(f"x has {n} rows of {t} steps; allowed: at least 1 of both")
        rows = state.shape[0] if "indices" in given else n
        if state.shape[2] < max(1, taps - 1) or state.shape[0] < n:
            raise ArgumentError(
                f"conv_state has shape {tuple(state.shape)}; allowed: ({n}, {c}, {max(1, taps - 1)} or more), the last "
                "inputs of each row"
            )
        shapes = {"weight": (c, taps), "bias": (c,), "conv_state": (rows, c, state.shape[2]), "indices": (n,),
                  "positions": (n,)}  # fmt: skip
        for name, shape in shapes.items():
            if name not in given:
                continue
            tensor = _check_shape(name, given[name], shape)
            like = torch.int32 if name in ("indices", "positions") else given["weight"].dtype if name == "bias" else x.dtype
            if name != "weight" and tensor.dtype != like:
                raise ArgumentError(f"{_spoken(name)} has dtype {tensor.dtype}; allowed: {like}; convert it")
        for name in ("x", "weight"):
            if given[name].dtype not in FLOATS:
                raise ArgumentError(f"{name} has dtype {given[name].dtype}; allowed: float16, bfloat16 or float32")

    def workload(self, given: Mapping[str, torch.Tensor]) -> Workload:
        n, c, t, taps = self.sizes(given)
        rows, _, length = given["conv_state"].shape
        stages = [*(["bias"] if "bias" in given else []), *(["silu"] if self.silu else [])]
        return causal_conv1d_update(
            n=n, c=c, t=t, taps=taps, length=length, rows=rows, indices="indices" in given, positions="positions" in given,
            dtype=dtype_name(given["x"].dtype), weight_dtype=dtype_name(given["weight"].dtype), layout=self.layout,
            epilogue=stages,
        )  # fmt: skip

    def empty(self, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return torch.empty(given["x"].shape, dtype=given["x"].dtype, device=given["x"].device)

    def plain(self, given: Mapping[str, torch.Tensor], scalars: Mapping[str, float]) -> torch.Tensor:
        x = given["x"].transpose(1, 2) if self.layout == "NTC" else given["x"]
        states, (n, c, t, taps) = given["conv_state"], self.sizes(given)
        length, weight = states.shape[2], given["weight"].float()
        rows = given["indices"].long() if "indices" in given else torch.arange(n, device=x.device)
        exists = (rows >= 0) & (rows < states.shape[0])
        held, safe = torch.arange(length, device=x.device), rows.clamp(0, states.shape[0] - 1)
        old = states[safe]
        start = given["positions"].long() if "positions" in given else torch.zeros(n, dtype=torch.long, device=x.device)
        order = ((held + start[:, None]) % length)[:, None].expand(n, c, length)  # the oldest input first
        inputs = torch.cat([old.gather(2, order), x], 2)
        first = length - taps + 1
        z = sum(inputs[:, :, first + k : first + k + t].float() * weight[:, k, None] for k in range(taps))
        assert isinstance(z, torch.Tensor)
        z = z + given["bias"].float()[:, None] if "bias" in given else z
        y = torch.nn.functional.silu(z) if self.silu else z
        last, shift = inputs[:, :, -length:], t if "positions" in given else 0
        places = ((held + start[:, None] + shift) % length)[:, None].expand(n, c, length)
        new = torch.empty_like(old).scatter_(2, places, last)
        states[rows[exists]] = new[exists]
        y = y.where(exists[:, None, None], 0.0).to(given["x"].dtype)
        return (y.transpose(1, 2) if self.layout == "NTC" else y).contiguous()


_eager_forward, _eager_states, _eager_backward, _eager_update = map(
    eager, ("causal_conv1d", "causal_conv1d_states", "causal_conv1d_backward", "causal_conv1d_update")
)


class Causal(torch.autograd.Function):
    """A causal convolution with gradients; its results are y, or y and the final state."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, initial: Any, seq_idx: Any, parameters: str) -> Any:
        ctx.save_for_backward(x, weight, bias, initial, seq_idx)
        ctx.parameters = parameters
        return compute(x, weight, bias, initial, seq_idx, parameters)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        x, weight, bias, initial, seq_idx = ctx.saved_tensors
        dy, d_final = given if len(given) == 2 else (given[0], None)
        differentiate = _Gradients.apply if torch.is_grad_enabled() else _gradients
        found = list(differentiate(x, weight, bias, dy, initial, d_final, seq_idx, ctx.parameters))
        dx, dw = found[0], found[1]
        db = found[2] if bias is not None else None
        d_initial = found[-1] if initial is not None else None
        return dx, dw, db, d_initial, None, None


class _Gradients(torch.autograd.Function):
    """The gradients, which have no gradients themselves."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        return tuple(_gradients(*args))

    @staticmethod
    def backward(ctx: object, *_: object) -> Any:
        raise RuntimeError(
            "schedsearch.torch.causal_conv1d has no second derivative; use torch.nn.functional.conv1d(groups=channels)"
        )


def compute(x: Any, weight: Any, bias: Any, initial: Any, seq_idx: Any, parameters: str) -> Any:
    """y, or y and the final state, without gradients."""
    states = parameters.split(",")[2] == "1"
    if torch.compiler.is_compiling():
        operators = torch.ops.schedsearch
        operator = operators.causal_conv1d_states if states else operators.causal_conv1d
    else:
        operator = _eager_states if states else _eager_forward
    return operator(x, weight, bias, initial, seq_idx, parameters)


def _gradients(x: Any, weight: Any, bias: Any, dy: Any, initial: Any, d_final: Any, seq_idx: Any, parameters: str) -> Any:
    operator = torch.ops.schedsearch.causal_conv1d_backward if torch.compiler.is_compiling() else _eager_backward
    dy = dy.contiguous()
    d_final = None if d_final is None else d_final.contiguous()
    return operator(x, weight, bias, dy, initial, d_final, seq_idx, parameters)


def update(x: Any, weight: Any, bias: Any, conv_state: Any, indices: Any, positions: Any, parameters: str) -> Any:
    """y of new steps; `conv_state` is updated."""
    operator = torch.ops.schedsearch.causal_conv1d_update if torch.compiler.is_compiling() else _eager_update
    return operator(x, weight, bias, conv_state, indices, positions, parameters)


def by_torch(x: Any, weight: Any, bias: Any, initial: Any, seq_idx: Any, parameters: str) -> Any:
    """The same as `compute` by PyTorch's own operators, which may be transformed."""
    kind = CausalConv1dStates if parameters.split(",")[2] == "1" else CausalConv1d
    operation, tensors = kind.of(parameters), (x, weight, bias, initial, seq_idx)
    given = operation.named(tensors)
    operation.check(given)
    return operation.plain(given, {})
