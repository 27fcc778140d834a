"""What is compared with a model: networks as built, and torch modules, of which the model is an export."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from schedsearch.network_check.draws import Wanted, plain, stored
from schedsearch.network_check.rule import Difference
from schedsearch.typed import Array

if TYPE_CHECKING:
    from schedsearch.dynamic.executable import DynamicExecutable
    from schedsearch.dynamic.program import DynamicValue
    from schedsearch.executable.fixed import FixedNet
    from schedsearch.executable.net import Net

NO_CHECK = "--no-check (in Python check=False)"


class Subject(Protocol):
    """Attributes:
    what: it is, for messages.
    inputs: in the model's order.
    sizes: value inside that it can show -> number of elements.
    """

    what: str
    inputs: list[Wanted]
    sizes: Mapping[str, int]

    def dtype(self, value: str) -> str:
        """The dtype of a value or of an output, by our names."""
        ...

    def outputs(self, inputs: Mapping[str, Array]) -> list[Array]:
        """All outputs in the model's order of axes. Raises IndexRangeError if an input is out of range."""
        ...

    def values(self, inputs: Mapping[str, Array], names: Collection[str]) -> dict[str, Array]:
        """Some of the values of `sizes`."""
        ...

    def untaken(self) -> list[str]:
        """The branches that no run has taken yet."""
        ...

    def complaint(self, value: str, apart: Difference, source: str) -> str:
        """What is wrong, in which value of the model, and what to do."""
        ...


def subjects_of(net: Net) -> Iterator[Subject]:
    """What is compared of a network: what it is at the sizes at which it is compared, one by one."""
    from schedsearch.dynamic.executable import DynamicExecutable
    from schedsearch.executable.fixed import FixedNet
    from schedsearch.executable.sized import SizedNet

    if isinstance(net, DynamicExecutable):
        for sizes in ComputedSizes.sizes_of(net):
            yield from (ComputedSizes(net, sizes, mode) for mode in ("exact", "bounded"))
    elif isinstance(net, SizedNet):
        for size in dict.fromkeys((net.sizes[0], net.sizes[-1], net.sizes[len(net.sizes) // 2])):
            yield BuiltNet(net.at(size), f" at {net.name} = {size}")
    elif isinstance(net, FixedNet):
        yield BuiltNet(net)


def wrong(what: str, value: str, apart: Difference, source: str) -> str:
    """The message about a network that is wrong."""
    return (
        f"{what} computes something else than {source}; the first value that differs is {value}: "
        f"{apart.text('the network', 'the model')}. Nothing was written. This is a fault of schedsearch: please report it "
        f"with the model. {NO_CHECK} builds it all the same"
    )


class BuiltNet:
    """A network of fixed sizes."""

    def __init__(self, net: FixedNet, at: str = "") -> None:
        self._net, self.what = net, f"the network{at}"
        arrays = net.program.arrays
        made = [arrays[call.buffers[name]] for call in net.steps if not call.is_conversion for name in call.outputs]
        self.sizes: Mapping[str, int] = {each.name: int(np.prod(each.shape, dtype=np.int64)) for each in made}
        self._dtypes = {each.name: each.dtype for each in made} | {each.name: each.dtype for each in net.outputs}
        below = net.index_limits()
        self.inputs = [
            Wanted(port.name, _in_order(port.bound, port.layout, port.axes), port.dtype, below.get(port.name))
            for port in net.inputs
        ]

    def dtype(self, value: str) -> str:
        return self._dtypes.get(value, "float32")

    def outputs(self, inputs: Mapping[str, Array]) -> list[Array]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the arrays are in the host's memory
            found = self._net(**self._given(inputs))
        several = found if isinstance(found, tuple) else (found,)
        return [port.in_model_order(plain(each)) for port, each in zip(self._net.outputs, several)]

    def untaken(self) -> list[str]:
        return self._net.untaken

    def values(self, inputs: Mapping[str, Array], names: Collection[str]) -> dict[str, Array]:
        return {name: plain(each) for name, each in self._net.trace_some(self._given(inputs), names).items()}

    def complaint(self, value: str, apart: Difference, source: str) -> str:
        return wrong(self.what, value, apart, source)

    def _given(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        found = {}
        for port in self._net.inputs:
            order = [port.axes.index(axis) for axis in port.layout]
            found[port.name] = stored(np.asarray(inputs[port.name]).transpose(order), port.dtype)
        return found


def _in_order(shape: tuple[int, ...], layout: str, axes: str) -> tuple[int, ...]:
    return tuple(shape[layout.index(axis)] for axis in axes)


class ComputedSizes:
    """A graph whose sizes are computed, at sizes that the caller chose.

    Attributes:
        run_mode: exact or bounded.
    """

    def __init__(self, net: DynamicExecutable, sizes: Mapping[str, int], run_mode: str) -> None:
        self._net, self._run_mode = net, run_mode
        at = ", ".join(f"{name} = {size}" for name, size in sizes.items())
        self.what = f"the graph, run {run_mode}{at and f' at {at}'}"
        self._shown = {name: each for name, each in net.program.shows.items() if net.program.values[each.name].is_visible}
        self.sizes: Mapping[str, int] = {
            name: math.prod(_extents(net.program.values[each.name], sizes)) for name, each in self._shown.items()
        }
        self.inputs = [Wanted(port.name, port.at(sizes).bound, port.dtype) for port in net.inputs]

    @classmethod
    def sizes_of(cls, net: DynamicExecutable) -> list[dict[str, int]]:
        """The smallest, the largest, and one between of every size."""
        open_ones = net.dimensions
        ends = [
            {name: each.least for name, each in open_ones.items()},
            {name: each.most for name, each in open_ones.items()},
            {name: (each.least + each.most) // 2 for name, each in open_ones.items()},
        ]
        return [each for number, each in enumerate(ends) if each not in ends[:number]]

    def dtype(self, value: str) -> str:
        inside = {name: self._net.program.values[each.name].dtype for name, each in self._shown.items()}
        return (inside | {port.name: port.dtype for port in self._net.outputs}).get(value, "float32")

    def _given(self, inputs: Mapping[str, Array]) -> list[Any]:
        return [self._on_device(stored(inputs[port.name], port.dtype)) for port in self._net.inputs]

    def outputs(self, inputs: Mapping[str, Array]) -> list[Array]:
        given = self._given(inputs)
        if self._run_mode == "exact":
            found = self._net.net(*given)
            several = found if isinstance(found, tuple) else (found,)
            self._net.net.check()
            return [plain(_on_host(each)) for each in several]
        bound = self._net.bind(*given)
        try:
            pairs = bound.step()
            bound.check()
            self._net.net.check()
            return [_used(plain(_on_host(each.array)), each.extents) for each in pairs]
        finally:
            bound.close()

    def untaken(self) -> list[str]:
        return []

    def values(self, inputs: Mapping[str, Array], names: Collection[str]) -> dict[str, Array]:
        shown = {name: self._shown[name] for name in names}
        given, inside = self._given(inputs), [each.name for each in shown.values()]
        if self._run_mode == "exact":
            held = self._net.net.trace(inside, *given)
        else:
            bound = self._net.bind(*given)
            try:
                bound.step()
                held = bound.trace(inside)
            finally:
                bound.close()
        return {name: _shown(held[each.name], each.order) for name, each in shown.items()}

    def complaint(self, value: str, apart: Difference, source: str) -> str:
        return wrong(self.what, value, apart, source)

    def _on_device(self, array: Array) -> Any:
        if self._net.net.device.target.kind == "cpu":
            return array
        import torch

        return torch.from_numpy(array).cuda(self._net.net.device.target.ordinal)


def _shown(array: Array, order: tuple[int, ...]) -> Array:
    """The axes of the model's value; a scalar, which has none, is held with one."""
    return array.transpose(order) if order else array.reshape(())


def _used(array: Array, extents: object) -> Array:
    """What counts of a result of a bounded run: all of it, if it has no extents."""
    return array if extents is None else array[tuple(slice(int(n)) for n in np.asarray(_on_host(extents)))]


def _on_host(array: object) -> Any:
    return array.cpu().numpy() if hasattr(array, "cpu") else array


def _extents(value: DynamicValue, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(each if isinstance(each, int) else each.at(sizes) for each in value.known or value.shape)
