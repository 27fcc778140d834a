"""From an ONNX model whose sizes are known at run time only to an executable that runs here."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from schedsearch.deadline import NEVER, Deadline
from schedsearch.device import open_device
from schedsearch.dynamic.code import machine_code
from schedsearch.dynamic.executable import DynamicExecutable
from schedsearch.dynamic.file import RUN_MODES, DynamicBundle, RunMode
from schedsearch.dynamic.graph import DynamicGraph, DynamicProgram, Size
from schedsearch.errors import UnsupportedError, UsageError, did_you_mean
from schedsearch.executable.build_options import BuildOptions, check_choice, check_tune_s
from schedsearch.executable.build_sized import build_sized, read_sized
from schedsearch.executable.finish import finish, result_text
from schedsearch.executable.kernels import find_kernels
from schedsearch.executable.program import ChosenKernel
from schedsearch.executable.reading import ReadModel, read_file
from schedsearch.executable.sized_build import UnknownDimensionError
from schedsearch.executable.sized_tune import missing_calls, tune_groups
from schedsearch.executable.timely import found_before
from schedsearch.measurement import COLD_GRAPH, DEFAULT_DB
from schedsearch.network.costs import costs_of
from schedsearch.network.given_inputs import Inputs
from schedsearch.network.graph import Network, Plan
from schedsearch.network.indexing import ConstantIndexError
from schedsearch.network.invalid import ModelError, NoOperatorError
from schedsearch.network.plan import best_plan, missing
from schedsearch.ops.params import MAX_INT
from schedsearch.progress import is_shown, shown, stage
from schedsearch.target import Target
from schedsearch.text import counted
from schedsearch.workload import Workload

if TYPE_CHECKING:
    from schedsearch.executable.net import Net
    from schedsearch.network.model import Loaded

_OF_TABLE = (
    "dtype, layout, io_layout and weights are for tables of kernels for each size, not for graphs with computed sizes"
)


def build_dynamic(
    model: str | os.PathLike[str],
    sizes: Mapping[str, tuple[int, int]],
    *,
    run_mode: RunMode | None = None,
    dtype: str | None = None,
    layout: str = "auto",
    io_layout: str = "NCHW",
    weights: str = "inside",
    db: str | os.PathLike[str] = DEFAULT_DB,
    out: str | os.PathLike[str] | None = None,
    target: str | Target = "auto",
    inputs: Inputs | None = None,
    tune_s: float | None = None,
    strict: bool = False,
    mode: str = COLD_GRAPH,
    check: bool = True,
    say: Callable[[str], None] | None = None,
    progress: bool = True,
    way: RunMode | None = None,
) -> Net:
    """Turns an ONNX model with sizes that are known at run time only into an executable for this machine's device.

    With `run_mode`, or with several dimensions, it is a graph whose sizes are computed on the device. With one dimension it
    is a table from size to kernels, tuned for the range where `db` has such kernels; if a node of the model has no operator
    for fixed sizes, which reading the model tells, and nothing is asked that only tables have, it is a graph, too. `build`
    takes the same dimensions as `dynamic`.

    Args:
        model: path of an ONNX file; `schedsearch.dynamic.model` says which nodes a graph may have.
        sizes: name of a dynamic dimension of the inputs -> the smallest and the largest size.
        run_mode: asks for a graph and says how its calls run: exact, where the host reads sizes and outputs have exactly the
            right shapes, or bounded, where nothing is copied to the host and outputs are pairs (array, extents). `bind` runs
            bounded in any case.
        dtype, layout, io_layout, weights: as of `build`, for tables only.
        db: the records; it may be missing if `strict` is false.
        out: a file to write as well, for `schedsearch.load`.
        target: auto, cpu, cuda, cuda:N, or a detected `Target`.
        inputs: as of `build`.
        tune_s: seconds to measure kernels that have no record yet, the most telling first; None: none. Those of a table are
            tuned for the range, those of a graph at their bounds. It is the time of the whole call, as of `build`. The
            records go to `db`.
        strict: refuse kernels that were not measured for exactly their workload, or their range, on this kind of device.
        mode: how the records were timed.
        check: as of `build`; the smallest and the largest sizes and some between are compared, and both modes.
        say: takes a line about each stage, and one every few seconds of long ones; default: `progress` says them.
        progress: whether to show each stage on standard error, and tuning as `schedsearch.tune` does.
        way: the earlier name of `run_mode`.

    Raises:
        WrongNetworkError: as of `build`.
        UsageError: an argument is impossible, a bound is missing or reversed, the model has no such dimension, or it cannot
            be read (ModelError).
        NoRecordError: `strict`, and records are missing; or no kernel runs a workload. The message lists them.
        DatabaseError, DeviceError: the database, the file or the device cannot be used.

    Examples:
        >>> net = schedsearch.build_dynamic("resnet50.onnx", {"n": (1, 64)}, out="resnet50.ssx")
        >>> y = net(x)  # of 1 to 64 images
    """
    check_tune_s(tune_s)
    is_part = is_shown() or say is not None
    with shown(progress, say) as display:
        display.stage("looking at the device and the options")
        options = BuildOptions.of(
            Deadline.within(tune_s), db=db, out=out, dtype=dtype, layout=layout, io_layout=io_layout, weights=weights,
            target=target, tunes=tune_s is not None, strict=strict, mode=mode, check=check, patient=True,
            inputs=inputs or {}, say=say or display.say,
        )  # fmt: skip
        net = dynamic_net(model, sizes, way if run_mode is None else run_mode, options)
        if not is_part:
            display.say(result_text(net, options))
    return net


def dynamic_net(
    model: str | os.PathLike[str],
    sizes: Mapping[str, tuple[int, int]],
    run_mode: RunMode | None,
    options: BuildOptions,
) -> Net:
    """As `build_dynamic`, of checked options: a table of sizes where that is possible and nothing else was asked."""
    check_choice("run_mode", run_mode, RUN_MODES, optional=True)
    bounds = {name: _size(name, limits) for name, limits in sizes.items()}
    of_table = (options.dtype, options.layout, options.io_layout, options.weights) != (None, "auto", "NCHW", "inside")
    loaded, origin = read_file(Path(model), options)
    fixed = {each.name: each.most for each in bounds.values() if each.least == each.most}
    if len(fixed) < len(bounds):  # a size that cannot change is none that a caller chooses
        _check_names(loaded, fixed)
        loaded = loaded.at(fixed)
        bounds = {name: size for name, size in bounds.items() if name not in fixed}
    if of_table and (run_mode is not None or len(bounds) != 1):
        raise UsageError(f"{_OF_TABLE}; leave them out, or give one dimension and no run_mode")
    no_table = ""
    if run_mode is None and len(bounds) == 1:
        (size,) = bounds.values()
        try:
            table = read_sized(loaded, size, options)
        except ConstantIndexError:
            raise  # it is out of range in a graph, too
        except (ModelError, UnsupportedError) as error:
            if of_table:
                raise type(error)(f"{error}. {_OF_TABLE}; leave them out for a graph") from error
            if not isinstance(error, UnknownDimensionError):  # a size inside, or a mistake that the graph's reader names
                why = error.nodes if isinstance(error, NoOperatorError) else error
                no_table = f"; a table of kernels for each size is not possible either: {why}"
                options.say(f"no table of kernels for each size: {why}. Next: a graph whose sizes are computed")
        else:
            return build_sized(table, origin, options)
    elif run_mode is None and bounds:
        name, size = next(iter(bounds.items()))
        no_table = (
            ". With a range of one dimension only, a table of kernels for each size may be possible: fix the others, as in "
            f"{name}={size.most}..{size.most}"
        )
    return _graph_net(loaded, origin, bounds, run_mode or "exact", options, no_table)


def _check_names(loaded: Loaded, names: Collection[str]) -> None:
    """Raises ModelError unless all are names of dimensions of inputs."""
    known = {
        str(extent.value)
        for value in loaded.model.graph.inputs
        for extent in value.shape or ()
        if not isinstance(extent, int)
    }
    for name in names:
        if name not in known:
            allowed = f"allowed: {', '.join(sorted(known)) or 'none'}"
            raise ModelError(f"{loaded.name} has no dynamic dimension {name!r}{did_you_mean(name, known)}; {allowed}")


def _graph_net(
    loaded: Loaded,
    origin: ReadModel,
    bounds: Mapping[str, Size],
    run_mode: RunMode,
    options: BuildOptions,
    no_table: str,
) -> DynamicExecutable:
    """The stages of a graph whose sizes are computed. `no_table` is added to why it cannot be one."""
    others: list[Workload] = []
    stage(f"planning the graph of {origin.name}")
    try:
        graph, known = _read(loaded, bounds, options, others), None
    except UsageError as error:
        raise (ModelError if isinstance(error, ModelError) else UsageError)(f"{error}{no_table}") from error
    if options.tunes:
        known = _tune(graph, others, options, options.needed_by(origin.check_s))
        graph = _read(loaded, bounds, options, [])
    program = graph.program()
    _check_memory(program, options.target)
    stage("compiling and verifying the kernels of the graph")
    found, (of_sizes,) = machine_code(
        [program], options.db, options.target, mode=options.mode, strict=options.strict, known=known
    )  # fmt: skip
    calls = sum(len(segment.calls) for segment in program.segments)
    segments, kinds = counted(len(program.segments), "segment"), counted(len(found), "different kernel")
    options.say(f"{counted(calls, 'call')} in {segments}, {kinds}")
    bundle = DynamicBundle.of(
        graph, options.target, found.__getitem__, sizes=of_sizes, run_mode=run_mode, model=origin.name
    )  # fmt: skip
    return finish(DynamicExecutable(bundle, open_device(options.target)), origin, options)


def _read(loaded: Loaded, bounds: Mapping[str, Size], options: BuildOptions, planned: list[Workload]) -> DynamicGraph:
    """The graph, planned by the records that there are. Adds to `planned` what its static subgraphs could be made of and has
    no measurement."""
    from schedsearch.dynamic.model import read_graph
    from schedsearch.dynamic.static import Planner

    with contextlib.ExitStack() as stack:

        def plan(network: Network) -> Plan:
            costs = stack.enter_context(costs_of(network, options.db, options.target, options.mode))
            planned.extend(task.workload for task in missing(network, costs))
            return best_plan(network, costs)

        return read_graph(loaded, bounds, planner=Planner(plan))


def _tune(
    graph: DynamicGraph, others: list[Workload], options: BuildOptions, deadline: Deadline
) -> Mapping[Workload, ChosenKernel] | None:
    """Measures kernels of the graph, and of what its static subgraphs could be made of, that have no record yet. Returns the
    kernels of the graph without that, which were found first."""
    db, target, mode, say = options.db, options.target, options.mode, options.say
    workloads = [call.workload for segment in graph.program().segments for call in segment.calls]
    with costs_of(None, db, target, mode) as costs:
        groups = missing_calls(workloads, others, costs)
    known = None
    if groups and not options.strict:
        find = functools.partial(find_kernels, db=db, target=target, mode=mode)
        known = found_before(find, workloads, deadline, NEVER, say)
    tune_groups(groups, db, target, deadline, mode, say)
    return known


def _check_memory(program: DynamicProgram, target: Target) -> None:
    """Raises UsageError if the device cannot hold one of the arrays at its bound."""
    for value in program.values.values():
        if 0 < target.memory_bytes < value.nbytes:
            needed, there = (f"{n / 2**30:.4g} GiB" for n in (value.nbytes, target.memory_bytes))
            raise UsageError(
                f"{value.name} has up to {value.dtype} {list(value.shape)}, which is {needed}; {target.name} has {there}; "
                "give smaller bounds"
            )


def _size(name: str, limits: object) -> Size:
    if not isinstance(limits, tuple | list) or len(limits) != 2 or any(type(each) is not int for each in limits):
        raise UsageError(
            f"the sizes of {name!r} are {limits!r}; give the smallest and the largest, e.g. {{{name!r}: (1, 64)}}"
        )
    least, most = limits
    if least > most:
        raise UsageError(
            f"{name}={least}..{most} is reversed; allowed: LEAST..MOST with 0 <= LEAST <= MOST; give ({most}, {least})"
        )
    if most > MAX_INT:
        raise UsageError(f"{name}={least}..{most} is not possible; allowed: sizes from 0 to {MAX_INT}")
    return Size(name, least, most)
