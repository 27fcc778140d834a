"""From an ONNX model and a range of sizes to one executable for all of them; `sized_build` has the steps."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from schedsearch.deadline import Deadline
from schedsearch.device import open_device
from schedsearch.executable.built import lower_for, say_weights, source_of_file, unchecked
from schedsearch.executable.references import find as find_references
from schedsearch.executable.sized import SizedNet
from schedsearch.executable.sized_build import SizedBuild, open_shapes
from schedsearch.executable.timely import check_s
from schedsearch.network.costs import costs_of
from schedsearch.network.graph import Network
from schedsearch.network.model import reader
from schedsearch.target import Target


def read_sized(
    model: Path,
    name: str,
    low: int,
    high: int,
    *,
    dtype: str | None,
    layout: str,
    io_layout: str,
    db: str | os.PathLike[str],
    target: Target,
    strict: bool,
    mode: str,
    say: Callable[[str], None],
) -> SizedBuild:
    """The network of every size of a dimension, for `build_sized`.

    Raises:
        ConstantIndexError: an index of the model is out of range at some size.
        ModelError, UnsupportedError: there are no such networks: the range is too large or has 0, no input has the
            dimension, or a node has no operator for fixed sizes.
    """
    shapes, graph_of = open_shapes(model, name), reader(model)

    def network_of(size: int) -> Network:
        return lower_for(graph_of(shapes(size)), dtype, layout, target).with_io_layout(io_layout)

    build = SizedBuild(
        network_of, name, low, high, target=target, db=db, mode=mode, strict=strict, model=model.name, say=say
    )  # fmt: skip
    build.networks()
    return build


def build_sized(
    build: SizedBuild,
    model: Path,
    *,
    dtype: str | None,
    layout: str,
    weights: str,
    db: str | os.PathLike[str],
    target: Target,
    tunes: bool,
    deadline: Deadline,
    started: float,
    mode: str,
    check: bool,
    say: Callable[[str], None],
    out: str | os.PathLike[str] | None,
) -> SizedNet:
    """The networks of all sizes in one executable; see `schedsearch.build_dynamic`.

    Args:
        started: `time.monotonic()` when the build began.
    """
    source = source_of_file(model, dtype) if check else None
    if tunes:
        until = deadline.before(check_s(source, time.monotonic() - started))
        with contextlib.ExitStack() as stack:
            build.tune(lambda network: stack.enter_context(costs_of(network, db, target, mode)), layout, until)
    device = open_device(target)
    try:
        with contextlib.ExitStack() as stack:
            outside = None
            if weights == "reference" and out is not None:
                outside = functools.partial(find_references, model=model, folder=Path(out).parent)
            costs = functools.partial(costs_of, db=db, target=target, mode=mode)
            bundle = build.bundle(lambda network: stack.enter_context(costs(network)), layout, device, outside)
            if outside is not None:
                nbytes = {sha256: data.nbytes for sha256, data in bundle.weights.items()}
                say_weights(nbytes, bundle.references, model, say)
    except BaseException:
        device.close()
        raise
    net = SizedNet(bundle, device)
    try:
        if source is None:
            say(unchecked(False))
        else:
            from schedsearch.network_check.check import check_sized

            checked = check_sized(net, source, started, say)
            bundle = replace(bundle, table=replace(bundle.table, checked=checked))
            net.take(bundle)
        if out is not None:
            bundle.save(out)
    except BaseException:
        net.close()
        raise
    return net
