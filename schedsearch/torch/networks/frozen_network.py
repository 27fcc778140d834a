"""A network of ours that computes a graph of PyTorch: built with copies of its weights, and run on PyTorch's tensors.

See docs/decisions/153-networks-for-parts-of-a-model.md.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from schedsearch.deadline import NEVER, Deadline
from schedsearch.runtime.streams import current_stream
from schedsearch.torch.layers.kernel_op import Kernels
from schedsearch.torch.operators.store import capturing

_log = logging.getLogger("schedsearch.torch")
_ALIGNMENT = 256  # bytes, more than a kernel needs; a captured call cannot copy inputs to where they have it
_captured_nets: list[Any] = []  # CUDA graphs use their memory, and nothing says when these end
Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


class FrozenNetwork:
    """A network that computes what a graph computes, with the weights that the graph had.

    Its memory is freed by `close`, or with this object. While a CUDA graph is captured, its kernels are captured one by one.
    The CUDA graph then uses the network's memory, so that the network is never freed.

    Args:
        module: the graph; its parameters and buffers are its own, and every input is one of a call.
        given: inputs as calls have them: real tensors.
        expected: outputs of PyTorch; those of the network get the same strides.
        tunes: whether kernels that have no record are tuned.
        deadline: of building and tuning.

    Raises:
        OutOfTimeError: it is over before the network could be built.
        SchedsearchError: the graph cannot be built; ModelError lists the nodes that have no operator.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        given: Sequence[torch.Tensor],
        expected: Sequence[torch.Tensor],
        kernels: Kernels,
        tunes: bool = False,
        deadline: Deadline = NEVER,
    ) -> None:
        self._device = kernels.device
        self._stream: torch.cuda.Stream | None = None  # of the last call
        self._turns = threading.Lock()
        images = [place for place, each in enumerate(given) if _is_channels_last(each)]
        self._nhwc = bool(images)
        # The net returns images in the form that its first input has.
        self._order = [*images, *(place for place in range(len(given)) if place not in set(images))]
        self._formats = [
            torch.channels_last if self._nhwc and each.dim() == 4 else torch.contiguous_format for each in given
        ]
        self.forms = [form_of(each) for each in expected]
        self._net = self._built(_reordered(module, self._order), self._arranged(given), kernels, tunes, deadline)
        self._current_handle = current_stream("torch", self._net.device)
        self._free = weakref.finalize(self, _freed, self._net, self._device)
        self._free.atexit = False  # the device may be gone by then, and the system frees everything anyway

    def _built(
        self, module: fx.GraphModule, given: Sequence[torch.Tensor], kernels: Kernels, tunes: bool, deadline: Deadline
    ) -> Any:
        from schedsearch.executable.build import build_within

        _log.info("a network is traced")
        options: dict[str, Any] = {"say": lambda text: _log.info("%s", text)}
        options |= {"io_layout": "NHWC" if self._nhwc else "NCHW", "target": kernels.target}
        options |= {"db": kernels.db, "check": False}  # whoever makes it compares it with the graph itself
        return build_within(deadline, module, tuple(given), tunes=tunes, **options)

    def _arranged(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Inputs in the order and the memory format that the net takes."""
        formats = self._formats
        return [given[place].contiguous(memory_format=formats[place]) for place in self._order]

    def __call__(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        arranged = self._arranged(given)
        if capturing(self._device):
            if self._net not in _captured_nets:
                _captured_nets.append(self._net)
            return self._formed(self._net(*(each if _is_aligned(each) else each.clone() for each in arranged)))
        if self._device.type == "cpu":
            return self._formed(self._net(*arranged))
        with self._turns:  # its memory is one for all streams
            before = self._stream
            if before is None or before.cuda_stream != self._current_handle():
                self._stream = torch.cuda.current_stream(self._device)
                if before is not None:
                    self._stream.wait_stream(before)
            return self._formed(self._net(*arranged))

    def _formed(self, found: Any) -> list[torch.Tensor]:
        """Outputs with the strides of PyTorch's."""
        outputs = list(found) if isinstance(found, tuple) else [found]
        for place, (each, form) in enumerate(zip(outputs, self.forms)):
            shape, strides, _ = form
            if tuple(each.shape) == shape and each.stride() != strides:
                outputs[place] = each.new_empty_strided(shape, strides).copy_(each)
        return outputs

    @contextmanager
    def captured_for_a_while(self) -> Iterator[None]:
        """CUDA graphs that capture the network inside are gone at its end, and do not keep it from being freed."""
        before = self._net in _captured_nets
        try:
            yield
        finally:
            if not before and self._net in _captured_nets:
                _captured_nets.remove(self._net)

    def close(self) -> None:
        """Frees the network, unless a CUDA graph captured it."""
        self._free()


def _freed(net: Any, device: torch.device) -> None:
    if net in _captured_nets:
        return
    if device.type == "cuda":
        if capturing(device):  # to wait would break the capture
            _captured_nets.append(net)
            return
        torch.cuda.synchronize(device)
    net.close()


def form_of(each: torch.Tensor) -> Form:
    return tuple(each.shape), each.stride(), each.dtype


def copied(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy of a graph, and for each node that of the copy."""
    copy, places = fx.Graph(), dict[fx.Node, fx.Node]()
    copy.output(copy.graph_copy(graph, places))
    for old, new in places.items():
        new.meta = dict(old.meta)
    return copy, places


def _reordered(module: fx.GraphModule, order: Sequence[int]) -> fx.GraphModule:
    """A graph whose inputs come in another order."""
    made = fx.GraphModule(module, copied(module.graph)[0])
    inputs = [node for node in made.graph.nodes if node.op == "placeholder"]
    before: Callable[[fx.Node], None] = next(iter(made.graph.nodes)).prepend
    for place in order:
        before(inputs[place])
        before = inputs[place].append
    made.recompile()
    return made.eval()


def _is_channels_last(each: torch.Tensor) -> bool:
    """Whether a tensor has this format and no other; an image of one channel or one pixel has both."""
    return each.dim() == 4 and each.is_contiguous(memory_format=torch.channels_last) and not each.is_contiguous()


def _is_aligned(each: torch.Tensor) -> bool:
    return each.data_ptr() % _ALIGNMENT == 0


def is_weight(each: object) -> bool:
    """Whether an input of a graph of torch.compile is a parameter or buffer of the model."""
    return isinstance(each, nn.Parameter) or getattr(each, "_dynamo_static_input_type", None) is not None
