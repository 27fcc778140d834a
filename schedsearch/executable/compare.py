"""The error of every layer of a network against the model that it was made from, computed in the model's own precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedsearch.errors import UsageError
from schedsearch.executable.net import Net
from schedsearch.executable.times import time_on_cpu_ns

if TYPE_CHECKING:
    import numpy as np
    from onnx import ModelProto

    from schedsearch.network.given_inputs import Inputs

_ERRORS_ONLY = 4  # level of ONNX Runtime's messages on stderr
_WHOLE = "iub"  # NumPy's kinds of integers and truth values


@dataclass(frozen=True)
class LayerError:
    """How far a value of the network is from the model's.

    Attributes:
        value: its name in the model.
        relative: the largest difference, divided by the largest finite magnitude of the model's value.
        largest: the largest difference; of integers the number of steps. Infinity where only one of two numbers is NaN or
            infinite.
        elements: how many numbers the value has.
        equal: how many of them are the model's own in every bit; None of a value that is not of integers on both sides.
    """

    value: str
    relative: float
    largest: float
    elements: int
    equal: int | None


def layer_errors(
    net: Net, model: Path, inputs: Mapping[str, np.ndarray[Any, Any]], constants: Inputs | None = None
) -> list[LayerError]:
    """Compares every value that the network computes and the model names, in the order of the network.

    ONNX Runtime computes the model if it is installed, otherwise ONNX's reference evaluator, which is slow.

    Args:
        model: an ONNX file with the same inputs.
        inputs: by name, in the network's dtypes and layouts.
        constants: inputs of the model that the network was built without, and their values; see `build`.

    Raises:
        UsageError: onnx is not installed, the file is not a valid ONNX model, or it has other inputs.
    """
    import numpy as np

    from schedsearch.network_check.rule import distance

    found = net.trace(**inputs)
    plain = {port.name: port.in_model_order(np.asarray(inputs[port.name])) for port in net.inputs}
    wanted = _evaluated(model, plain, list(found), constants)
    errors = []
    for name, array in found.items():
        if name not in wanted:
            continue
        truth = np.asarray(wanted[name])
        if truth.shape != array.shape:
            raise UsageError(
                f"{name} has shape {array.shape} in the network and {truth.shape} in {model}; give the model that it was "
                "built from"
            )
        exact = truth.astype(np.float64)
        largest = float(distance(array.astype(np.float64), exact).max(initial=0.0))
        scale = float(np.abs(exact[np.isfinite(exact)]).max(initial=0.0))
        whole = array.dtype.kind in _WHOLE and truth.dtype.kind in _WHOLE
        equal = int(np.count_nonzero(array == truth)) if whole else None
        errors.append(LayerError(name, largest / scale if scale else largest, largest, array.size, equal))
    if not errors:
        raise UsageError(f"{model} has none of the network's values; give the model that it was built from")
    return errors


@dataclass(frozen=True)
class PeerTime:
    """What another library needs for the model: its name with version and device, and the median time of a run."""

    name: str
    time_ns: float


def onnxruntime_time(
    net: Net, model: Path, inputs: Mapping[str, np.ndarray[Any, Any]], repeat: int, constants: Inputs | None = None
) -> PeerTime | None:
    """The time of ONNX Runtime on this machine's CPU, with its own optimisation and threads; None if it is not installed.

    Args:
        model: as for `layer_errors`, which accepted it.
        inputs: by name, in the network's dtypes and layouts.
        constants: as of `layer_errors`.
    """
    import numpy as np

    try:
        import onnxruntime
    except ImportError:
        return None
    plain = {port.name: port.in_model_order(np.asarray(inputs[port.name])) for port in net.inputs}
    proto, feeds = _with_feeds(model, plain, constants)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _ERRORS_ONLY
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    session.run(None, feeds)
    time_ns = time_on_cpu_ns(lambda: session.run(None, feeds), repeat)
    return PeerTime(f"ONNX Runtime {onnxruntime.__version__} on the CPU", time_ns)


def _with_feeds(
    path: Path, inputs: Mapping[str, np.ndarray[Any, Any]], constants: Inputs | None
) -> tuple[ModelProto, dict[str, np.ndarray[Any, Any]]]:
    """A model with its weights, and the inputs in its own dtypes."""
    from schedsearch.network.model import needed, read_proto

    needed()
    import onnx

    model, _ = read_proto(path, constants)
    onnx.load_external_data_for_model(model, str(path.resolve().parent))
    taken = {each.name: each.type.tensor_type.elem_type for each in model.graph.input}
    taken = {name: kind for name, kind in taken.items() if name not in {each.name for each in model.graph.initializer}}
    if sorted(taken) != sorted(inputs):
        got = f"{path} has the inputs {', '.join(taken)}, the network {', '.join(inputs)}"
        more = sorted({*taken} - {*inputs})
        built = f", and the values that it was built with, e.g. --input {more[0]}=VALUE" if more else ""
        raise UsageError(f"{got}; give its own model{built}")
    for each in model.graph.input:
        extents = [dimension.dim_value for dimension in each.type.tensor_type.shape.dim]  # 0: dynamic
        given = inputs[each.name].shape if each.name in inputs else tuple(extents)
        if len(given) != len(extents) or any(extent not in (0, n) for extent, n in zip(extents, given)):
            raise UsageError(f"{each.name} is {list(given)} in the network and {extents} in {path}; give its own model")
    return model, {name: array.astype(onnx.helper.tensor_dtype_to_np_dtype(taken[name])) for name, array in inputs.items()}


def _evaluated(
    path: Path, inputs: Mapping[str, np.ndarray[Any, Any]], names: list[str], constants: Inputs | None
) -> Mapping[str, np.ndarray[Any, Any]]:
    """The values of a model by name, as far as it has them."""
    model, feeds = _with_feeds(path, inputs, constants)
    import onnx

    from schedsearch.network_check.evaluators import NotEvaluableError, OnnxReference, evaluators

    made = {name for node in model.graph.node for name in node.output}
    asked = [name for name in names if name in made]
    if not asked:
        return {}
    del model.graph.output[:]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in asked)
    evaluator = evaluators()[0]
    try:
        return dict(zip(asked, evaluator.open(model).run(feeds)))
    except NotEvaluableError as error:
        remedy = "; install onnxruntime" if isinstance(evaluator, OnnxReference) else ""
        raise UsageError(f"{evaluator.name} cannot compute {path}: {error}{remedy}") from error
