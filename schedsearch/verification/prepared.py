"""A kernel as callers with prepared constants use it."""

from __future__ import annotations

from collections.abc import Mapping

from schedsearch.device import BoundKernel, LoadedKernel, Workspaces


class PreparedPath:
    """A `LoadedKernel` whose `bind` prepares the constants among the buffers and leaves the constant steps out."""

    def __init__(self, kernel: LoadedKernel) -> None:
        self._kernel = kernel
        self.artifact, self.device = kernel.artifact, kernel.device

    def bind(
        self,
        buffers: Mapping[str, int],
        scalars: Mapping[str, float],
        prepared: Workspaces | None = None,
        *,
        early: bool = False,
    ) -> BoundKernel:
        return self._kernel.bind(buffers, scalars, prepared or self.prepare(buffers), early=early)

    def prepare(self, addresses: Mapping[str, int], stream: int = 0) -> Workspaces:
        return self._kernel.prepare(addresses, stream)

    def close(self) -> None:
        self._kernel.close()
