"""`schedsearch.build`: from a model to a network that runs here.

`fixed_net` is the way of a model, stage by stage. Each stage is one module, which takes what the stage before made; see
docs/architecture.md, "From an ONNX file to a network that runs".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from schedsearch.deadline import Deadline
from schedsearch.device import open_device
from schedsearch.errors import OutOfTimeError, UsageError
from schedsearch.executable.assemble import assemble
from schedsearch.executable.build_options import BuildOptions, check_choice, check_tune_s
from schedsearch.executable.finish import finish, result_text
from schedsearch.executable.fixed import FixedNet
from schedsearch.executable.lowering import lowered
from schedsearch.executable.onnx_runtime import ONNX_RUNTIME, require
from schedsearch.executable.outside import with_references
from schedsearch.executable.planned import with_kernels
from schedsearch.executable.reading import OF_A_NETWORK, read
from schedsearch.measurement import COLD_GRAPH, DEFAULT_DB
from schedsearch.network.given_inputs import Inputs
from schedsearch.network.graph import Network
from schedsearch.progress import is_shown, shown, stage
from schedsearch.target import Target
from schedsearch.text import counted, type_text

if TYPE_CHECKING:
    from schedsearch.dynamic.file import RunMode
    from schedsearch.executable.net import Net

FALLBACKS = (ONNX_RUNTIME,)
MANY = 64
"""Nodes, or modules inside of a module: with as many, it takes longer to export or to plan than to start compilers."""


def build(
    model: str | os.PathLike[str] | Network | Any,
    example: object = None,
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
    inputs: Inputs | None = None,
    dynamic: Mapping[str, tuple[int, int]] | None = None,
    run_mode: RunMode | None = None,
    tune_s: float | None = None,
    strict: bool = False,
    mode: str | None = None,
    check: bool = True,
    say: Callable[[str], None] | None = None,
    progress: bool = True,
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
        inputs: input of an ONNX file -> the value that it always has, e.g. {"sr": 16000}: a number, nested lists of numbers,
            or an array of its shape and dtype. The net does not take such an input, and branches that it decides are gone.
        dynamic: dimension of an ONNX file's inputs that callers choose -> the smallest and the largest size. What becomes of
            them says `schedsearch.build_dynamic`.
        run_mode: asks for a graph whose sizes are computed, and says how its calls run: exact or bounded.
        tune_s: seconds to measure kernels of the plan that have no record yet, at most one kernel for each second; None:
            none. It is the time of the whole call: reading the model, finding kernels, tuning, comparing and writing. All
            kernels that need no tuning are compiled and verified first; tuning gets the time that is then left, less what
            must follow. If nothing is left, nothing is tuned, and the call takes as long as it needs. `say` is told what
            had no time. The records go to `db`.
        strict: refuse kernels that were not measured for exactly their workload on this kind of device.
        mode: how the records were timed; new ones are timed in the same way. Default: `build_options.network_mode`. Records
            in another mode serve where there are none in this one.
        check: compare the network once with the model, on inputs drawn from a seed; `Net.checked` says what computed the
            model. False: for models that neither ONNX Runtime nor onnx's evaluator runs. A `Network` has no
            model and is never checked.
        say: takes a line about each stage, and one every few seconds of long ones; default: `progress` says them.
        progress: whether to show each stage on standard error, and tuning as `schedsearch.tune` does.
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
    is_dynamic = dynamic is not None or run_mode is not None
    file = _dynamic_file(model, example, shapes, fallback) if is_dynamic else ""
    mode = COLD_GRAPH if mode is None and is_dynamic else mode
    is_part = is_shown() or say is not None
    with shown(progress, say) as display:
        display.stage("looking at the device and the options")
        options = BuildOptions.of(
            Deadline.within(tune_s), db=db, out=out, dtype=dtype, layout=layout, io_layout=io_layout, weights=weights,
            target=target, tunes=tune_s is not None, strict=strict, mode=mode, check=check, patient=True,
            inputs=inputs or {}, say=say or display.say,
        )  # fmt: skip
        net: Net
        if is_dynamic:
            from schedsearch.dynamic.build import dynamic_net

            net = dynamic_net(file, dynamic or {}, run_mode, options)
        else:
            net = fixed_net(model, example, shapes or {}, fallback, options)
        if not is_part:
            display.say(result_text(net, options))
    return net


def _dynamic_file(model: object, example: object, shapes: object, fallback: str | None) -> str | os.PathLike[str]:
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


def build_within(deadline: Deadline, model: Any, example: Any, **options: Any) -> FixedNet:
    """As `build`, as a part of something that has a deadline, with the options of `BuildOptions`.

    Raises:
        OutOfTimeError: not `patient`, and the deadline passed before all kernels were compiled. Those that were are in the
            build cache, so that another call goes on.
    """
    return fixed_net(model, example, {}, None, BuildOptions.of(deadline, **options))


def fixed_net(
    model: Any, example: Any, shapes: Mapping[str, Sequence[int]], fallback: str | None, options: BuildOptions
) -> FixedNet:
    """The stages of a network of fixed sizes, one after the other. Raises as `build` and `build_within`."""
    check_choice("fallback", fallback, FALLBACKS, optional=True)
    if fallback is not None:
        require(f"fallback={fallback!r}")
        if isinstance(model, Network):
            raise UsageError(OF_A_NETWORK)
    from schedsearch.runtime.ahead import Compilers

    with Compilers(options.target) as compilers:
        if not options.strict and _parts_of(model) >= MANY:
            compilers.start(_parts_of(model))
        graph, origin = read(model, example, shapes, options)
        stage(f"looking for kernels for the nodes of {origin.name or 'the network'}")
        network = graph if isinstance(graph, Network) else lowered(graph, options, fallback)
        if options.deadline.passed and not options.patient:
            raise OutOfTimeError("there was no time left after the model was read")
        if not options.strict and len(network.nodes) >= MANY:
            compilers.start(len(network.nodes))
        planned, kernels = with_kernels(network, options, options.needed_by(origin.check_s), compilers)
    nodes, conversions = len(list(network.all_nodes)), len(planned.plan.conversions)
    options.say(
        f"{counted(nodes, 'node')}, {counted(conversions, 'conversion')} of layouts, "
        f"{counted(len(kernels), 'different kernel')}"
    )
    stage("planning memory and packing weights")
    executable = assemble(
        network, planned.plan, dict(kernels).__getitem__, target=options.target.key, model=origin.name,
        reasons=planned.reasons,
    )  # fmt: skip
    executable = with_references(executable, network, origin, options)
    net = FixedNet(executable, open_device(options.target))
    return finish(net, origin, options)


def _parts_of(model: Any) -> int:
    """About how many nodes a torch module has: the modules inside of it, or the nodes of its graph; 0 of anything else."""
    modules, nodes = getattr(model, "modules", None), getattr(getattr(model, "graph", None), "nodes", ())
    return max(len(nodes), sum(1 for _ in modules())) if callable(modules) else 0
