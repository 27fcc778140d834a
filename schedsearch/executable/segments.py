"""The calls of a network on a GPU: graphs of kernels, with the subgraphs between them that ONNX Runtime computes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from schedsearch.device import BoundKernel
from schedsearch.executable.onnx_runtime import BoundOnnxModel

if TYPE_CHECKING:
    from schedsearch.device.cuda import CudaDevice
    from schedsearch.device.cuda_graph import KernelGraph


class Segments:
    """Calls as CUDA graphs, one for each run of kernels without a subgraph in between; without subgraphs that is one.

    Raises:
        DriverError: the driver refuses a kernel.
    """

    def __init__(self, device: CudaDevice, bound: Sequence[BoundKernel]) -> None:
        from schedsearch.device.cuda_graph import KernelGraph
        from schedsearch.device.cuda_kernel import CudaBoundKernel

        self._launches: list[KernelGraph | BoundOnnxModel] = []
        self._places: dict[int, tuple[KernelGraph, int]] = {}  # number of a call -> its graph, and its number there
        numbered = list(enumerate(bound))
        try:
            for is_part, group in itertools.groupby(numbered, lambda each: isinstance(each[1], BoundOnnxModel)):
                calls = list(group)
                if is_part:
                    self._launches += [each for _, each in calls if isinstance(each, BoundOnnxModel)]
                    continue
                graph = KernelGraph(device, [each for _, each in calls if isinstance(each, CudaBoundKernel)])
                self._launches.append(graph)
                self._places |= {number: (graph, place) for place, (number, _) in enumerate(calls)}
        except BaseException:
            self.close()
            raise

    def update(self, number: int) -> None:
        """Takes over the addresses that the call of this number has now; a part has them already."""
        if number in self._places:
            graph, place = self._places[number]
            graph.update(place)

    def launch(self, stream: int) -> None:
        """Enqueues the kernels; a part is complete before those behind it are enqueued."""
        for each in self._launches:
            each.launch(stream)

    def close(self) -> None:
        for graph in {id(graph): graph for graph, _ in self._places.values()}.values():
            graph.close()
        self._places = {}
