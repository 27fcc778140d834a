"""`schedsearch.build`: from a model to a network that runs here."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedsearch.deadline import Deadline
from schedsearch.device import open_device
from schedsearch.device.detect import detect
from schedsearch.errors import OutOfTimeError, UsageError
from schedsearch.executable.assemble import assemble
from schedsearch.executable.build_options import IO_LAYOUTS, LAYOUT_CHOICES, WEIGHTS, check_choice, check_tune_s
from schedsearch.executable.built import lower_for, say_weights, source_of_file, unchecked
from schedsearch.executable.fixed import FixedNet
from schedsearch.executable.onnx_runtime import ONNX_RUNTIME, require
from schedsearch.executable.planned import with_kernels
from schedsearch.executable.references import find as find_references
from schedsearch.executable.stored import save
from schedsearch.executable.timely import check_s
from schedsearch.measurement import COLD_GRAPH, DEFAULT_DB, MODES
from schedsearch.network.facts import FLOATS
from schedsearch.network.graph import Network, Subgraph
from schedsearch.records.executables import check_writable
from schedsearch.target import Target
from schedsearch.text import counted, type_text

if TYPE_CHECKING:
    from schedsearch.dynamic.file import RunMode
    from schedsearch.executable.net import Net
    from schedsearch.network_check.source import Source

FALLBACKS = (ONNX_RUNTIME,)
_FEW_NODES = 4  # of a subgraph, in a line


def build(
    model: str | os.PathLike[str] | Network | Any,
    example: Any = None,
    *,
    db: str | os.PathLike[str] = DEFAULT_DB,
    out: str | os.PathLike[str] | None = None,
    dtype: str | None = None,
    layout: str = "auto",
    io_layout: str = "NCHW",
    weights: str = "inside",
    fallback: str | None = None,
    target: str | Target = "auto",
    shapes: Mapping[str, Sequence[int]] | None = None,
    dynamic: Mapping[str, tuple[int, int]] | None = None,
    run_mode: RunMode | None = None,
    tune_s: float | None = None,
    strict: bool = False,
    mode: str = COLD_GRAPH,
    check: bool = True,
    say: Callable[[str], None] = lambda text: None,
    way: RunMode | None = None,
) -> Net:
    """Turns a model into a network that runs on this machine's device, with the best recorded kernels.

    Args:
        model: path of an ONNX file; a torch module; or a `Network`.
        example: for a torch module: its input, or a tuple of several, for `torch.export`.
        db: the records; it may be missing if `strict` is false.
        out: a file to write as well, for `schedsearch.load`.
        dtype: float16, bfloat16 or float32, in place of the model's dtype of numbers in floating point, also of inputs and
            outputs; default: the model's own.
        layout: of images inside the network: auto, or NHWC or NCHW for all.
        io_layout: NCHW, or NHWC for networks whose caller has images in channels-last order: the layout in memory of all
            inputs and outputs with four dimensions. The shapes of a model remain those of the model.
        weights: inside `out`; or reference: those that the ONNX file has as they are stay there, and `out` says where they
            lie. Keep the two files in the same places relative to one another, and the model unchanged.
        fallback: onnxruntime: it computes the nodes that no kernel does, in as few subgraphs as possible; it is then needed
            to load, too. None: such nodes are refused.
        target: auto, cpu, cuda, cuda:N, or a detected `Target`.
        shapes: input of an ONNX file -> its shape, where the file leaves dimensions open.
        dynamic: dimension of an ONNX file's inputs that callers choose -> the smallest and the largest size. What becomes of
            them says `schedsearch.build_dynamic`.
        run_mode: asks for a graph whose sizes are computed, and says how its calls run: exact or bounded.
        tune_s: seconds to measure kernels of the plan that have no record yet, at most one kernel for each second; None:
            none. It is the time of the whole call: reading the model, finding kernels, tuning, comparing and writing. All
            kernels that need no tuning are compiled and verified first; tuning gets the time that is then left, less what
            must follow. If nothing is left, nothing is tuned, and the call takes as long as it needs. `say` is told what
            had no time. The records go to `db`.
        strict: refuse kernels that were not measured for exactly their workload on this kind of device.
        mode: how the records were timed; new ones are timed in the same way.
        check: compare the network once with the model, on inputs drawn from a seed; `Net.checked` says what computed the
            model. False: for models that neither ONNX Runtime nor onnx's evaluator runs. A `Network` has no
            model and is never checked.
        say: takes a line about each stage.
        way: the earlier name of `run_mode`.

    Raises:
        UsageError: an argument is impossible, or the model cannot be read or has operators that schedsearch lacks
            (ModelError, UnsupportedError); or `fallback` is not installed or cannot run them; or `check`, and no evaluator
            runs the model.
        WrongNetworkError: the network computes something else than the model. Nothing is written.
        NoRecordError: `strict`, and records are missing; or no kernel runs a workload. The message lists them.
        DatabaseError, DeviceError: the database, the file or the device cannot be used.

    Examples:
        >>> net = schedsearch.build("resnet50.onnx", db="records.db", dtype="float16", out="resnet50.ssx")
        >>> y = net(x)
    """
    check_tune_s(tune_s)
    run_mode = way if run_mode is None else run_mode
    if dynamic is None and run_mode is None:
        return build_within(
            Deadline.within(tune_s), model, example, db=db, out=out, dtype=dtype, layout=layout, io_layout=io_layout,
            weights=weights, fallback=fallback, target=target, shapes=shapes, tunes=tune_s is not None, strict=strict,
            mode=mode, check=check, patient=True, say=say,
        )  # fmt: skip
    from schedsearch.dynamic.build import build_dynamic

    file = _dynamic_file(model, example, shapes, fallback)
    return build_dynamic(
        file, dynamic or {}, run_mode=run_mode, dtype=dtype, layout=layout, io_layout=io_layout, weights=weights, db=db,
        out=out, target=target, tune_s=tune_s, strict=strict, mode=mode, check=check, say=say,
    )  # fmt: skip


def _dynamic_file(model: Any, example: Any, shapes: Any, fallback: str | None) -> str | os.PathLike[str]:
    """The path of a model with sizes that callers choose. Raises UsageError for what does not go with them."""
    if not isinstance(model, str | os.PathLike) or example is not None:
        raise UsageError(f"dynamic and run_mode are for ONNX files; model is {type_text(model)}")
    if shapes:
        raise UsageError("shapes does not go with dynamic and run_mode: dynamic gives the open dimensions; leave out shapes")
    if fallback is not None:
        raise UsageError(
            "fallback does not go with dynamic and run_mode: every node needs a kernel; for a fixed size give shapes in "
            "place of dynamic"
        )
    return model


def build_within(
    deadline: Deadline,
    model: str | os.PathLike[str] | Network | Any,
    example: Any = None,
    *,
    db: str | os.PathLike[str] = DEFAULT_DB,
    out: str | os.PathLike[str] | None = None,
    dtype: str | None = None,
    layout: str = "auto",
    io_layout: str = "NCHW",
    weights: str = "inside",
    fallback: str | None = None,
    target: str | Target = "auto",
    shapes: Mapping[str, Sequence[int]] | None = None,
    tunes: bool = False,
    strict: bool = False,
    mode: str = COLD_GRAPH,
    check: bool = True,
    patient: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> FixedNet:
    """As `build`, as a part of something that has a deadline.

    Args:
        tunes: whether kernels without a record are measured.
        patient: whether the network is built however long that takes.

    Raises:
        OutOfTimeError: not `patient`, and the deadline passed before all kernels were compiled. Those that were are in the
            build cache, so that another call goes on.
    """
    check_choice("layout", layout, LAYOUT_CHOICES)
    check_choice("io_layout", io_layout, IO_LAYOUTS)
    check_choice("weights", weights, WEIGHTS)
    check_choice("fallback", fallback, FALLBACKS, optional=True)
    check_choice("dtype", dtype, FLOATS, optional=True)
    check_choice("mode", mode, MODES)
    if fallback is not None:
        require(f"fallback={fallback!r}")
    file = Path(model) if isinstance(model, str | os.PathLike) else None
    if weights == "reference" and (out is None or file is None):
        raise UsageError("weights='reference' needs an ONNX file for `model`, and `out`, the file to write")
    if out is not None:
        check_writable(Path(out))
    target = detect(target) if isinstance(target, str) else target
    started = time.monotonic()
    network, name, source = _network(model, example, dtype, layout, target, shapes or {}, fallback, check)
    _say_subgraphs(network, say)
    if deadline.passed and not patient:
        raise OutOfTimeError("there was no time left after the model was read")
    if not isinstance(model, Network):
        network = network.with_io_layout(io_layout)
    elif io_layout != "NCHW":
        raise UsageError("a Network has its own layouts of inputs and outputs; use network.with_io_layout(...)")
    planned, kernels = with_kernels(
        network, Path(db), target, mode=mode, layout=layout, strict=strict, tunes=tunes, patient=patient, say=say,
        deadline=deadline.before(check_s(source, time.monotonic() - started)),
    )  # fmt: skip
    plan = planned.plan
    say(
        f"{counted(len(network.nodes), 'node')}, {counted(len(plan.conversions), 'conversion')} of layouts, "
        f"{counted(len(kernels), 'different kernel')}"
    )
    executable = assemble(
        network, plan, kernels.__getitem__, target=target.key, model=name, reasons=planned.reasons
    )  # fmt: skip
    net = FixedNet(executable, open_device(target))
    try:
        if source is None:
            say(unchecked(isinstance(model, Network)))
        else:
            from schedsearch.network_check.check import check_net

            executable = replace(
                executable, program=replace(executable.program, checked=check_net(net, source, started, say))
            )
            net.take(executable)
        if out is not None:
            outside = None
            if file is not None and weights == "reference":
                outside = find_references(executable.program, network.all_constants, file, Path(out).parent)
                nbytes = {sha256: data.nbytes for sha256, data in zip(executable.program.weights, executable.weights)}
                say_weights(nbytes, outside, file, say)
            save(executable, out, outside)
    except BaseException:
        net.close()
        raise
    return net


def _network(
    model: Any,
    example: Any,
    dtype: str | None,
    layout: str,
    target: Target,
    shapes: Mapping[str, Sequence[int]],
    fallback: str | None,
    check: bool,
) -> tuple[Network, str, Source | None]:
    """The network of a model, the name of its file, and, with `check`, what it is compared with."""
    if isinstance(model, Network):
        if example is not None or dtype is not None or shapes or fallback is not None:
            raise UsageError("a Network has its dtypes, shapes and subgraphs; leave out example, dtype, shapes and fallback")
        return model, "", None
    from schedsearch.network.model import read_model

    lowered = functools.partial(lower_for, dtype=dtype, layout=layout, target=target, fallback=fallback)
    if isinstance(model, str | os.PathLike):
        if example is not None:
            raise UsageError("example is for a torch module; for the shapes of an ONNX file give shapes={input: shape}")
        network = lowered(read_model(Path(model), shapes))
        return network, Path(model).name, source_of_file(Path(model), dtype) if check else None
    if not (hasattr(model, "forward") and hasattr(model, "state_dict")):
        raise UsageError(
            f"model is {type_text(model)}; allowed: the path of an ONNX file, a torch module, or a schedsearch Network"
        )
    if example is None:
        raise UsageError("a torch module needs an example of its input: schedsearch.build(module, example)")
    from schedsearch.network.torch_export import export

    name = type(model).__name__
    if not check:
        return lowered(export(model, example)), name, None
    from schedsearch.network_check.torch_module import checked_export

    graph, source = checked_export(model, example, dtype)
    return lowered(graph), name, source


def _say_subgraphs(network: Network, say: Callable[[str], None]) -> None:
    for subgraph in network.nodes:
        if isinstance(subgraph, Subgraph):
            named = "; ".join(
                f"{name}: {reason}" for name, reason in list(zip(subgraph.sources, subgraph.reasons))[:_FEW_NODES]
            )
            more = len(subgraph.sources) - _FEW_NODES
            others = f" and {more} more (--explain lists them)" if more > 0 else ""
            say(f"ONNX Runtime computes {counted(len(subgraph.sources), 'node')} as {subgraph.name}: {named}{others}")
