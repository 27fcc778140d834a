"""The short path of a net's call on a GPU: for torch tensors that look like those of an earlier call, which was checked."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from schedsearch.device import Device
from schedsearch.executable.run import Calls
from schedsearch.runtime.streams import current_stream, raw_stream


class TorchNetCall:
    """Copies the inputs to the graph's addresses, launches it, and copies the outputs to new tensors.

    A tensor matches if class, dtype, shape, strides and device are those of the checked call; its address may differ.

    Args:
        inputs, outputs: tensors of the checked call, in the network's order.
        staged: addresses of the graph's inputs and outputs.
        device_name: (cuda, ordinal).
    """

    __slots__ = ("_calls", "_copy", "_current_stream", "_device_name", "_inputs", "_outputs")

    def __init__(
        self,
        calls: Calls,
        device: Device,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        staged: tuple[Sequence[int], Sequence[int]],
        device_name: tuple[str, int],
    ) -> None:
        self._calls, self._copy, self._device_name = calls, device.copy, device_name
        self._inputs = [
            (type(each), each.dtype, each.shape, each.stride(), each.get_device(), address, each.nbytes)
            for each, address in zip(inputs, staged[0])
        ]
        self._outputs = [(_allocator(each), address, each.nbytes) for each, address in zip(outputs, staged[1])]
        self._current_stream = current_stream("torch", device_name)

    def __call__(self, args: tuple[Any, ...], stream: Any) -> Any:
        """The outputs, or None if a tensor does not match. Nothing happens before all have matched.

        Raises:
            ArgumentError: `stream` is not a stream.
            DeviceError: a copy or the launch failed.
        """
        if len(args) != len(self._inputs):
            return None
        for tensor, (kind, dtype, shape, strides, ordinal, _, _) in zip(args, self._inputs):
            if (
                type(tensor) is not kind
                or tensor.dtype is not dtype
                or tensor.shape != shape
                or tensor.stride() != strides
                or tensor.get_device() != ordinal
            ):
                return None
        handle = self._current_stream() if stream is None else raw_stream(stream, "torch", self._device_name)
        for tensor, each in zip(args, self._inputs):
            self._copy(each[5], tensor.data_ptr(), each[6], handle)
        self._calls.launch(handle)
        results = []
        for allocate, address, nbytes in self._outputs:
            result = allocate()
            self._copy(result.data_ptr(), address, nbytes, handle)
            results.append(result)
        return results[0] if len(results) == 1 else tuple(results)


def _allocator(tensor: Any) -> Callable[[], Any]:
    import torch

    return functools.partial(
        torch.empty_strided, tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
