"""From an ONNX model and a range of sizes to one executable for all of them; `sized_build` has the steps."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import TYPE_CHECKING

from schedsearch.device import open_device
from schedsearch.errors import UnsupportedError
from schedsearch.executable.build_options import BuildOptions
from schedsearch.executable.finish import finish
from schedsearch.executable.lowering import lowered
from schedsearch.executable.outside import say_weights
from schedsearch.executable.ports import Size
from schedsearch.executable.reading import ReadModel, for_device
from schedsearch.executable.references import find
from schedsearch.executable.sized import SizedNet
from schedsearch.executable.sized_build import SizedBuild, open_shapes
from schedsearch.network.costs import costs_of
from schedsearch.network.graph import Control, Network
from schedsearch.network.model import listed

if TYPE_CHECKING:
    from schedsearch.network.model import Loaded


def read_sized(loaded: Loaded, size: Size, options: BuildOptions) -> SizedBuild:
    """The network of every size of a dimension, for `build_sized`.

    Raises:
        ConstantIndexError: an index of the model is out of range at some size.
        ModelError, UnsupportedError: there are no such networks: the range is too large or has 0, no input has the
            dimension, or a node has no operator for fixed sizes.
    """
    shapes = open_shapes(loaded, size.name)

    def network_of(n: int) -> Network:
        network = lowered(for_device(loaded.graph(shapes(n)), options), options)
        if controls := [node.name for node in network.nodes if isinstance(node, Control)]:
            raise UnsupportedError(
                f"{loaded.name}: the conditions of {listed(controls)} (If) are computed; allowed in a network for a range "
                "of sizes: constant ones. Give one size with --shape, or the inputs that decide with --input"
            )
        return network

    build = SizedBuild(
        network_of, size.name, size.least, size.most, target=options.target, db=options.db, mode=options.mode,
        strict=options.strict, model=Path(loaded.name).name, say=options.say,
    )  # fmt: skip
    build.networks()
    return build


def build_sized(build: SizedBuild, read: ReadModel, options: BuildOptions) -> SizedNet:
    """The networks of all sizes in one executable; see `schedsearch.build_dynamic`."""
    costs = functools.partial(costs_of, db=options.db, target=options.target, mode=options.mode)
    if options.tunes:
        until = options.needed_by(read.check_s)
        with contextlib.ExitStack() as stack:
            build.tune(lambda network: stack.enter_context(costs(network)), options.layout, until)
    device = open_device(options.target)
    try:
        with contextlib.ExitStack() as stack:
            outside = None
            if options.weights == "reference" and options.out is not None and read.path is not None:
                outside = functools.partial(find, model=read.path, folder=options.out.parent)
            bundle = build.bundle(lambda network: stack.enter_context(costs(network)), options.layout, device, outside)
            if outside is not None:
                nbytes = {sha256: data.nbytes for sha256, data in bundle.weights.items()}
                say_weights(nbytes, bundle.references, str(read.path), options.say)
    except BaseException:
        device.close()
        raise
    return finish(SizedNet(bundle, device), read, options)
