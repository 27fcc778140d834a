"""The calls of a network as few launches, with calls between them that the host makes itself: subgraphs that ONNX Runtime
computes, and programs of which it chooses one. On a GPU the others are graphs of kernels, on a CPU chains of steps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from schedsearch.device import BoundKernel
from schedsearch.executable.controlled import BoundControl
from schedsearch.executable.onnx_runtime import BoundOnnxModel

if TYPE_CHECKING:
    from collections.abc import Callable

    from schedsearch.device.cpu import CpuDevice
    from schedsearch.device.cuda import CudaDevice
    from schedsearch.device.cuda_graph import KernelGraph


HOST_CALLS = (BoundOnnxModel, BoundControl)


class Segments:
    """Calls as CUDA graphs, one for each run of kernels without a call of the host in between; without these that is one.

    Args:
        after: of each call, those that it waits for; default: the one before it.

    Attributes:
        launch: enqueues the kernels on a stream; a call of the host returns before those behind it are enqueued.
        launch_on_default_stream: the same on stream 0.

    Raises:
        DriverError: the driver refuses a kernel.
    """

    def __init__(
        self, device: CudaDevice, bound: Sequence[BoundKernel], after: Sequence[Sequence[int]] | None = None
    ) -> None:
        from schedsearch.device.cuda_graph import KernelGraph
        from schedsearch.device.cuda_kernel import CudaBoundKernel

        self._launches: list[KernelGraph | BoundOnnxModel | BoundControl] = []
        self._places: dict[int, tuple[KernelGraph, int]] = {}  # number of a call -> its graph, and its number there
        numbered = list(enumerate(bound))
        try:
            for is_apart, group in itertools.groupby(numbered, lambda each: isinstance(each[1], HOST_CALLS)):
                calls = list(group)
                if is_apart:
                    self._launches += [each for _, each in calls if isinstance(each, HOST_CALLS)]
                    continue
                places = {number: place for place, (number, _) in enumerate(calls)}
                own = None if after is None else [[places[each] for each in after[n] if each in places] for n in places]
                graph = KernelGraph(device, [each for _, each in calls if isinstance(each, CudaBoundKernel)], own)
                self._launches.append(graph)
                self._places |= {number: (graph, place) for number, place in places.items()}
        except BaseException:
            self.close()
            raise
        only = self._launches[0] if len(self._launches) == 1 else None
        self.launch: Callable[[int], None] = self._launch_all if only is None else only.launch
        self.launch_on_default_stream = only.launch_on_default_stream if isinstance(only, KernelGraph) else self.launch

    def update(self, number: int) -> None:
        """Takes over the addresses that the call of this number has now; a call of the host has them already."""
        if number in self._places:
            graph, place = self._places[number]
            graph.update(place)

    def _launch_all(self, stream: int) -> None:
        for each in self._launches:
            each.launch(stream)

    def close(self) -> None:
        for graph in {id(graph): graph for graph, _ in self._places.values()}.values():
            graph.close()
        self._places = {}


def captured(device: CudaDevice, stream: int, bound: Sequence[BoundKernel], after: Sequence[Sequence[int]]) -> None:
    """Brings calls, all of them kernels, into the graph that captures a stream.

    Args:
        after: as of `Segments`.
    """
    from schedsearch.device.cuda_graph import capture
    from schedsearch.device.cuda_kernel import CudaBoundKernel

    capture(device, stream, [each for each in bound if isinstance(each, CudaBoundKernel)], after)


def chained(device: CpuDevice, bound: Sequence[BoundKernel]) -> Callable[[int], None]:
    """All calls as one function of a stream. Kernels with no call of the host in between are one launch."""
    from schedsearch.device.cpu import BoundCpuKernel

    launches: list[Callable[[int], None]] = []
    for is_apart, group in itertools.groupby(bound, lambda each: isinstance(each, HOST_CALLS)):
        if is_apart:
            launches += [each.launch for each in group]
        else:
            launches.append(device.together([each for each in group if isinstance(each, BoundCpuKernel)]).launch)
    if len(launches) == 1:
        return launches[0]

    def launch(stream: int) -> None:
        for each in launches:
            each(stream)

    return launch
