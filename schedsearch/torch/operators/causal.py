"""Causal convolutions over time as functions, with the arguments of the package causal-conv1d."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from schedsearch.errors import ArgumentError, did_you_mean
from schedsearch.text import type_text
from schedsearch.torch.operators.integers import whole
from schedsearch.torch.operators.sequences import ACTIVATIONS, FLOATS, Causal, by_torch, compute, parameters_text, update
from schedsearch.torch.operators.transforms import transformed

MOST_BYTES = 16  # of one access of a kernel


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    cu_seqlens: torch.Tensor | None = None,
    dilation: int = 1,
) -> Any:
    """A causal depthwise convolution over time, in training as well: y[b,c,t] = activation(bias[c] + sum over k of
    x[b, c, t - (taps - 1 - k) * dilation] * weight[c,k]).

    A kernel computes it: that of the best record, else one of a rule-based configuration, which the first call builds in
    some seconds and later calls use for every length. After `use(None)`, or without a compiler, PyTorch does.

    There is no second derivative: a backward pass with create_graph=True raises RuntimeError when it is differentiated
    again. Gradients have the same bits in every call.

    Args:
        x: (batch, channels, time), float16, bfloat16 or float32. Memory may have channels side by side, as in
            `projected.transpose(1, 2)`, or time. Other strides cost a copy.
        weight: (channels, taps), 1 to 256 taps, of any of these dtypes.
        bias: (channels), of the weight's dtype.
        seq_idx: (batch, time), int32, never decreasing along time: the sequence of each step, for sequences packed behind
            one another. A step sees steps of its own sequence only. Numbers of it and of `cu_seqlens` are checked on a
            CPU only.
        initial_states: (batch, channels, (taps - 1) * dilation), of the dtype of x: what came before x; default: zeros.
        return_final_states: also return the last inputs, which are `initial_states` of what follows.
        final_states_out: a tensor for them.
        activation: None, "silu" or "swish", which is the same.
        cu_seqlens: (sequences + 1), int32, on the device of x: where packed sequences begin, and the end; batch is 1.
            Instead of `seq_idx`.
        dilation: steps between taps.

    Returns:
        y, of the shape, dtype and order in memory of x; with `return_final_states` (y, final states).

    Raises:
        ArgumentError: arguments that do not fit each other.

    Examples:
        >>> y = causal_conv1d(x, conv.weight.squeeze(1), conv.bias, activation="silu")
    """
    tensors = {"x": x, "weight": weight, "bias": bias, "seq_idx": seq_idx, "initial_states": initial_states,
               "cu_seqlens": cu_seqlens, "final_states_out": final_states_out}  # fmt: skip
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) and (tensor is not None or name in ("x", "weight")):
            raise ArgumentError(f"{name} is {type_text(tensor)}; allowed: a torch.Tensor")
    if x.dim() != 3:
        raise ArgumentError(f"x has shape {tuple(x.shape)}; allowed: (batch, channels, time)")
    _check_activation(activation)
    if final_states_out is not None and not return_final_states:
        raise ArgumentError("final_states_out is given without return_final_states; set it, or leave the tensor out")
    dilation = whole("dilation", dilation)
    if dilation < 1:
        raise ArgumentError(f"dilation is {dilation}; allowed: at least 1")
    if cu_seqlens is not None:
        if seq_idx is not None:
            raise ArgumentError("seq_idx and cu_seqlens are given; allowed: one of them")
        seq_idx = _numbers_of(cu_seqlens, x)
    elif seq_idx is not None:
        _check_order(seq_idx)
    x, weight, bias, initial_states = _autocast(x, weight, bias, initial_states)
    layout = layout_of(x)
    ordered = x.transpose(1, 2).contiguous() if layout == "NTC" else x.contiguous()
    parameters = parameters_text(layout, activation, return_final_states, dilation)
    operands = [each if each is None else each.contiguous() for each in (weight, bias, initial_states, seq_idx)]
    wanted = [each for each in (x, weight, bias, initial_states) if each is not None and each.requires_grad]
    run: Callable[..., Any] = compute
    if transformed():
        run = by_torch
    elif torch.is_grad_enabled() and wanted:
        run = Causal.apply
    found = run(ordered, *operands, parameters)
    y = found[0] if return_final_states else found
    y = y.transpose(1, 2) if layout == "NTC" else y
    if not return_final_states:
        return y
    final = found[1]
    if final_states_out is not None:
        if final_states_out.shape != final.shape or final_states_out.dtype != final.dtype:
            raise ArgumentError(
                f"final_states_out has shape {tuple(final_states_out.shape)} and dtype {final_states_out.dtype}; allowed: "
                f"{tuple(final.shape)} and {final.dtype}"
            )
        final = final_states_out.copy_(final)
    return y, final


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: torch.Tensor | None = None,
    conv_state_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """The next step, or steps, of `causal_conv1d`, from states that it updates in place: for decoding.

    A state has the last inputs, the newest at its end; the final states of `causal_conv1d` are such states. It computes no
    gradients.

    Args:
        x: (batch, channels), or (batch, channels, time).
        conv_state: (batch, channels, state length), of the dtype of x, or of any under autocast; at least taps - 1 long.
            Best contiguous, of the dtype that is computed in, at a multiple of 16 bytes: others are copied, and copied back.
        weight: (channels, taps).
        bias: (channels).
        activation: None, "silu" or "swish".
        cache_seqlens: (batch), int32: how many inputs each row had. States are then rings, in which the input of step s is
            at s modulo their length.
        conv_state_indices: (batch), int32: the state of each row, of as many as `conv_state` has. A row whose index is
            below 0 has y = 0 and changes nothing. Two rows must not have the same index. That, and an index without a
            state, is refused on a CPU only.

    Returns:
        y, of the shape and dtype of x; under autocast of its dtype.

    Raises:
        ArgumentError: arguments that do not fit each other, or one that requires a gradient while gradients are on.

    Examples:
        >>> y = causal_conv1d_update(token, conv_state, conv.weight.squeeze(1), conv.bias, activation="silu")
    """
    tensors = {"x": x, "conv_state": conv_state, "weight": weight, "bias": bias, "cache_seqlens": cache_seqlens,
               "conv_state_indices": conv_state_indices}  # fmt: skip
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) and (tensor is not None or name in ("x", "conv_state", "weight")):
            raise ArgumentError(f"{name} is {type_text(tensor)}; allowed: a torch.Tensor")
    _check_activation(activation)
    if x.dim() not in (2, 3):
        raise ArgumentError(f"x has shape {tuple(x.shape)}; allowed: (batch, channels) or (batch, channels, time)")
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors.values()):
        raise ArgumentError(
            "causal_conv1d_update has no gradients, and one of its tensors requires one; call it under torch.no_grad(), or "
            "use causal_conv1d with initial_states"
        )
    steps = x[:, :, None] if x.dim() == 2 else x
    steps, weight, bias, state = _autocast(steps, weight, bias, conv_state)
    layout = layout_of(steps)
    ordered = steps.transpose(1, 2).contiguous() if layout == "NTC" else steps.contiguous()
    weight, bias, indices, positions = (
        None if each is None else each.contiguous() for each in (weight, bias, conv_state_indices, cache_seqlens)
    )
    if indices is not None and indices.shape == x.shape[:1] and _may_read(indices):
        _check_indices(indices, conv_state.shape[0])
    if positions is not None and positions.shape == x.shape[:1] and _may_read(positions):
        _check_positions(positions if indices is None else positions[indices >= 0])
    _check_memory(conv_state)
    apart = state is not conv_state or not state.is_contiguous() or _is_misaligned(state)
    state = state.clone(memory_format=torch.contiguous_format) if apart else state
    y = update(ordered, weight, bias, state, indices, positions, parameters_text(layout, activation, False, 1))
    if apart:
        conv_state.copy_(state)
    elif not torch.compiler.is_compiling() and not conv_state.is_inference():
        torch.autograd.graph.increment_version(conv_state)
    y = y.transpose(1, 2) if layout == "NTC" else y
    return y[:, :, 0] if x.dim() == 2 else y


def layout_of(x: torch.Tensor) -> str:
    """NTC if channels are neighbours in memory, else NCT. A tensor of one step, or of one channel, may be both."""
    return "NTC" if x.stride(1) == 1 and not x.is_contiguous() else "NCT" if x.shape[2] > 1 else "NTC"


def _autocast(x: torch.Tensor, *others: torch.Tensor | None) -> Any:
    """The tensors, in autocast's dtype if it is on for the device of x. As in PyTorch, integers and float64 stay."""
    if x.device.type not in ("cpu", "cuda") or not torch.is_autocast_enabled(x.device.type):
        return x, *others
    dtype = torch.get_autocast_dtype(x.device.type)
    return tuple(each.to(dtype) if each is not None and each.dtype in FLOATS else each for each in (x, *others))


def _check_activation(activation: object) -> None:
    if activation in ACTIVATIONS or torch.compiler.is_compiling():  # the operator refuses it, whose words Dynamo shows
        return
    hint = did_you_mean(activation, ["silu", "swish"]) if isinstance(activation, str) else ""
    raise ArgumentError(f"activation is {activation!r}{hint}; allowed: None, 'silu' or 'swish'")


def _check_order(seq_idx: torch.Tensor) -> None:
    """Raises ArgumentError if numbers decrease. On a GPU this would wait for the device, so it is left out."""
    if seq_idx.dim() != 2 or not _may_read(seq_idx):
        return
    if bool((seq_idx[:, 1:] < seq_idx[:, :-1]).any()):
        raise ArgumentError("seq_idx decreases along time; allowed: the number of each step's sequence, in order")


def _check_positions(positions: torch.Tensor) -> None:
    """Raises ArgumentError if a row had less than no inputs."""
    if bool((positions < 0).any()):
        raise ArgumentError(f"cache_seqlens has {int(positions.min())}; allowed: at least 0, how many inputs a row had")


def _check_indices(indices: torch.Tensor, states: int) -> None:
    """Raises ArgumentError if a row has no state, or two rows have the same."""
    if bool((indices >= states).any()):
        raise ArgumentError(
            f"conv_state_indices has {int(indices.max())}, and conv_state has {states} states; allowed: up to {states - 1}, "
            "below 0 for padding"
        )
    named, rows = indices[indices >= 0].unique(return_counts=True)
    if bool((rows > 1).any()):
        raise ArgumentError(
            f"conv_state_indices has {int(named[rows > 1][0])} for {int(rows.max())} rows; allowed: another state for each "
            "row, below 0 for padding"
        )


def _check_memory(conv_state: torch.Tensor) -> None:
    """Raises ArgumentError if elements share memory, as after `expand`: they cannot be updated in place."""
    if any(size > 1 and stride == 0 for size, stride in zip(conv_state.shape, conv_state.stride(), strict=True)):
        raise ArgumentError(
            f"conv_state has strides {conv_state.stride()}, so elements share memory; allowed: memory for each; clone it"
        )


def _is_misaligned(tensor: torch.Tensor) -> bool:
    """Whether kernels that read whole vectors cannot update a tensor in place; graphs that are compiled do not ask."""
    if torch.compiler.is_compiling() or type(tensor) is not torch.Tensor or tensor.device.type == "meta":
        return False
    return not transformed() and bool(tensor.data_ptr() % MOST_BYTES)


def _may_read(tensor: torch.Tensor) -> bool:
    """Whether a tensor's numbers can be checked without a wait."""
    plain = type(tensor) is torch.Tensor and tensor.device.type == "cpu"  # a fake tensor has another type
    return plain and not (torch.compiler.is_compiling() or transformed())


def _numbers_of(cu_seqlens: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """seq_idx of the places where sequences begin."""
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2 or x.shape[0] != 1 or cu_seqlens.is_floating_point():
        raise ArgumentError(
            f"cu_seqlens has shape {tuple(cu_seqlens.shape)} and dtype {cu_seqlens.dtype}, and x a batch of {x.shape[0]}; "
            "allowed: the beginnings of sequences and the end as integers, and a batch of 1"
        )
    if _may_read(cu_seqlens):
        first, last, ordered = int(cu_seqlens[0]), int(cu_seqlens[-1]), bool((cu_seqlens[1:] >= cu_seqlens[:-1]).all())
        if (first, last) != (0, x.shape[2]) or not ordered:
            order = "" if ordered else ", and decreases in between"
            raise ArgumentError(
                f"cu_seqlens begins with {first} and ends with {last}{order}; allowed: from 0 to the {x.shape[2]} steps "
                "of x, never decreasing"
            )
    steps = torch.arange(x.shape[2], device=x.device, dtype=cu_seqlens.dtype)
    return torch.bucketize(steps, cu_seqlens[1:], right=True, out_int32=True)[None]
