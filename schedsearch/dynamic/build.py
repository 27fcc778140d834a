"""From an ONNX model whose sizes are known at run time only to an executable that runs here."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from schedsearch.device import open_device
from schedsearch.device.detect import detect
from schedsearch.dynamic.code import machine_code
from schedsearch.dynamic.executable import WAYS, DynamicExecutable, DynamicParts, Kernel, Way
from schedsearch.dynamic.graph import Size
from schedsearch.errors import UnsupportedError, UsageError
from schedsearch.executable.build import build_sized, costs_of
from schedsearch.executable.sized import SizedNet
from schedsearch.measurement import COLD_GRAPH, DEFAULT_DB, MODES
from schedsearch.network.model import ModelError
from schedsearch.network.plan import best_plan
from schedsearch.target import Target
from schedsearch.text import counted, quoted


def build_dynamic(
    model: str | os.PathLike[str],
    sizes: Mapping[str, tuple[int, int]],
    *,
    way: Way | None = None,
    dtype: str | None = None,
    layout: str = "auto",
    io_layout: str = "NCHW",
    db: str | os.PathLike[str] = DEFAULT_DB,
    out: str | os.PathLike[str] | None = None,
    target: str | Target = "auto",
    strict: bool = False,
    mode: str = COLD_GRAPH,
    say: Callable[[str], None] = lambda text: None,
) -> DynamicExecutable | SizedNet:
    """Turns an ONNX model with sizes that are known at run time only into an executable for this machine's device.

    If one dimension is open and every node has an operator for fixed sizes, the result is a `SizedNet`: a table from size to
    kernels, tuned for the range where `db` has such kernels. Otherwise it is a `DynamicExecutable`: a graph whose sizes are
    computed on the device.

    Args:
        model: path of an ONNX file; `schedsearch.dynamic.model` says which nodes a graph may have.
        sizes: name of a dynamic dimension of the inputs -> the smallest and the largest size.
        way: asks for a graph and says how its calls run: exact, where the host reads sizes and outputs have exactly the
            right shapes, or bounded, where nothing is copied to the host and outputs are pairs (array, extents). `bind` runs
            bounded in any case.
        dtype, layout, io_layout: as of `build`, for a `SizedNet`.
        db: the records; it may be missing if `strict` is false.
        out: a file to write as well, for `schedsearch.load`.
        target: auto, cpu, cuda, cuda:N, or a detected `Target`.
        strict: refuse kernels that were not measured for exactly their workload, or their range, on this kind of device.
        mode: how the records were timed.
        say: takes a line about each stage.

    Raises:
        UsageError: an argument is impossible, a bound is missing or reversed, the model has no such dimension, or it cannot
            be read (ModelError).
        NoRecordError: `strict`, and records are missing; or no kernel runs a workload. The message lists them.
        DatabaseError, DeviceError: the database, the file or the device cannot be used.

    Example:
        >>> net = schedsearch.build_dynamic("resnet50.onnx", {"n": (1, 64)}, out="resnet50.ssx")
        >>> y = net(x)  # of 1 to 64 images
    """
    if way not in (None, *WAYS):
        raise UsageError(f"way {quoted(way)} is not possible; allowed: {', '.join(WAYS)}, or None")
    if mode not in MODES:
        raise UsageError(f"mode {quoted(mode)} is not possible; allowed: {', '.join(MODES)}")
    bounds = {name: _size(name, limits) for name, limits in sizes.items()}
    target = detect(target) if isinstance(target, str) else target
    path, no_table = Path(model), ""
    if way is None and len(bounds) == 1 and path.is_file():
        (size,) = bounds.values()
        try:
            return build_sized(
                path, size.name, size.least, size.most, dtype=dtype, layout=layout, io_layout=io_layout, db=db,
                target=target, strict=strict, mode=mode, say=say, out=out,
            )  # fmt: skip
        except (ModelError, UnsupportedError) as error:
            no_table = f"; a table of kernels for each size is not possible either: {error}"
            say(f"a graph whose sizes are computed, because a table of kernels for each size is not possible: {error}")
    if dtype is not None or layout != "auto" or io_layout != "NCHW":
        raise UsageError(
            f"dtype, layout and io_layout are not for graphs whose sizes are computed; leave them out{no_table}"
        )
    from schedsearch.dynamic.model import read_graph
    from schedsearch.dynamic.static import Planner

    with contextlib.ExitStack() as stack:
        planner = Planner(lambda network: best_plan(network, stack.enter_context(costs_of(network, db, target, mode))))
        try:
            graph = read_graph(path, bounds, planner=planner)
        except ModelError as error:
            raise ModelError(f"{error}{no_table}") from error
    program = graph.program()
    calls = [call for segment in program.segments for call in segment.calls]
    found, (of_sizes,) = machine_code([program], db, target, mode=mode, strict=strict)
    segments, kinds = counted(len(program.segments), "segment"), counted(len(found), "different kernel")
    say(f"{counted(len(calls), 'call')} in {segments}, {kinds}")
    kernels = {workload: Kernel(each.artifact, each.origin) for workload, each in found.items()}
    parts = DynamicParts.of(graph, target, kernels.__getitem__, sizes=of_sizes, way=way or "exact", model=path.name)
    if out is not None:
        parts.save(out)
    return DynamicExecutable(parts, open_device(target))


def _size(name: str, limits: object) -> Size:
    if not isinstance(limits, tuple | list) or len(limits) != 2 or any(type(each) is not int for each in limits):
        raise UsageError(
            f"the sizes of {name!r} are {limits!r}; give the smallest and the largest, e.g. {{{name!r}: (1, 64)}}"
        )
    return Size(name, *limits)
