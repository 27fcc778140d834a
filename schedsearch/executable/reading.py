"""The first stage of `schedsearch.build`: what callers give as a model, as a graph."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedsearch.errors import UsageError
from schedsearch.executable.build_options import NEEDS_FILES, BuildOptions
from schedsearch.network.graph import Network
from schedsearch.progress import stage
from schedsearch.text import type_text

if TYPE_CHECKING:
    import onnx_ir as ir

    from schedsearch.network.model import Loaded
    from schedsearch.network_check.source import Source


OF_A_NETWORK = "a Network has its dtypes, shapes and subgraphs; leave out example, dtype, shapes and fallback"


@dataclass(frozen=True)
class ReadModel:
    """A model that was read.

    Attributes:
        name: of the file, the class of the module, or "".
        path: of an ONNX file.
        source: makes what the network is compared with; None: it is not compared.
        compared_s: how long it took to compare the graph with a torch module; 0 if that was not done.
    """

    name: str
    path: Path | None
    source: Callable[[], Source] | None
    compared_s: float = 0.0

    @property
    def check_s(self) -> float | None:
        """What is known of how long the comparison takes, as of `BuildOptions.needed_by`."""
        return None if self.source is None else self.compared_s


def read(
    model: Any, example: Any, shapes: Mapping[str, Sequence[int]], options: BuildOptions
) -> tuple[Network | ir.Model, ReadModel]:
    """A network, or the graph of an ONNX file or of a torch module, with shapes that are known.

    Raises:
        UsageError: there is something that does not go with such a model; or, as ModelError, it cannot be read.
        WrongNetworkError: PyTorch's exporter made another model of the module.
    """
    if options.weights == "reference" and not isinstance(model, str | os.PathLike):
        raise UsageError(NEEDS_FILES)
    if options.inputs and not isinstance(model, str | os.PathLike):
        raise UsageError(
            f"inputs is for ONNX files: it gives inputs of a file their value; model is {type_text(model)}. Leave out inputs"
        )
    if isinstance(model, Network):
        if example is not None or options.dtype is not None or shapes:
            raise UsageError(OF_A_NETWORK)
        if options.io_layout != "NCHW":
            raise UsageError("a Network has its own layouts of inputs and outputs; use network.with_io_layout(...)")
        return model, ReadModel("", None, None)
    if isinstance(model, str | os.PathLike):
        if example is not None:
            raise UsageError("example is for a torch module; for the shapes of an ONNX file give shapes={input: shape}")
        loaded, found = read_file(Path(model), options)
        return for_device(loaded.graph(shapes), options), found
    if not (hasattr(model, "forward") and hasattr(model, "state_dict")):
        raise UsageError(
            f"model is {type_text(model)}; allowed: the path of an ONNX file, a torch module, or a schedsearch Network"
        )
    if example is None:
        raise UsageError("a torch module needs an example of its input: schedsearch.build(module, example)")
    name = type(model).__name__
    stage(f"exporting {name} with torch.export")
    if not options.check:
        from schedsearch.network.torch_export import export

        return for_device(export(model, example), options), ReadModel(name, None, None)
    from schedsearch.network_check.torch_module import checked_export

    graph, source = checked_export(model, example, options.dtype)
    return for_device(graph, options), ReadModel(name, None, lambda: source, source.compared_s)


def read_file(path: Path, options: BuildOptions) -> tuple[Loaded, ReadModel]:
    """An ONNX file with whatever extents are open. Raises ModelError if it cannot be read."""
    stage(f"reading {path.name}")
    from schedsearch.network.model import load

    loaded = load(path, options.inputs)
    return loaded, ReadModel(path.name, path, functools.partial(_source, loaded, path, options) if options.check else None)


def for_device(graph: ir.Model, options: BuildOptions) -> ir.Model:
    """A graph in formats that the device has kernels for: it changes the graph, and returns it."""
    if options.target.kind == "cpu" and options.dtype is None:
        from schedsearch.network.formats import widen_halves

        widen_halves(graph)
    return graph


def _source(loaded: Loaded, path: Path, options: BuildOptions) -> Source:
    """After the last graph was made of the file: they share its numbers."""
    from schedsearch.network_check.source import Source

    return Source.of_proto(loaded.proto, path, options.dtype)
