"""What computes the model: ONNX Runtime where it is installed, else onnx's reference evaluator."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import onnx
from onnx import ModelProto

from schedsearch.typed import Array

_ERRORS_ONLY = 4  # level of ONNX Runtime's messages on stderr
MOST_PRODUCTS = 1 << 31  # that onnx's evaluator, which is slow, is asked for


class NotEvaluableError(Exception):
    """An evaluator cannot run a model. It never leaves this package."""


class Evaluator(Protocol):
    """Attributes:
    name: with its version, for people.
    """

    name: str

    def open(self, model: ModelProto) -> Opened:
        """Raises NotEvaluableError if it cannot run the model."""
        ...


class Opened(Protocol):
    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        """The outputs. Raises NotEvaluableError if it fails."""
        ...


class OnnxRuntime:
    """Without optimisation: with it, some models are computed wrong; see `known_faults`."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.name = f"ONNX Runtime {module.__version__}"

    def open(self, model: ModelProto) -> Opened:
        options = self._module.SessionOptions()
        options.log_severity_level = _ERRORS_ONLY
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.graph_optimization_level = self._module.GraphOptimizationLevel.ORT_DISABLE_ALL
        try:
            return _Session(
                self._module.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
            )
        except Exception as error:  # ONNX Runtime's errors have no common base
            raise NotEvaluableError(f"{self.name}: {error}") from error


class _Session:
    def __init__(self, session: Any) -> None:
        self._session = session

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        try:
            return [np.asarray(each) for each in self._session.run(None, dict(feeds))]
        except Exception as error:  # ONNX Runtime's errors have no common base
            raise NotEvaluableError(str(error)) from error


class OnnxReference:
    """The evaluator that is part of onnx."""

    name = f"onnx {onnx.__version__}"

    def open(self, model: ModelProto) -> Opened:
        from onnx.reference import ReferenceEvaluator

        from schedsearch.network_check.own_operators import of_opset

        version = next((each.version for each in model.opset_import if each.domain == ""), 1)
        try:
            return _Reference(ReferenceEvaluator(model, new_ops=of_opset(version)))
        except Exception as error:  # of many kinds
            raise NotEvaluableError(f"{self.name}: {error}") from error


class _Reference:
    def __init__(self, evaluator: Any) -> None:
        self._evaluator = evaluator

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        try:
            with np.errstate(all="ignore"):  # infinities are results like others
                return [np.asarray(each) for each in self._evaluator.run(None, dict(feeds))]
        except Exception as error:  # of many kinds
            raise NotEvaluableError(str(error)) from error


def evaluators() -> list[Evaluator]:
    """Those that are installed, the fast one first."""
    try:
        import onnxruntime
    except ImportError:
        return [OnnxReference()]
    return [OnnxRuntime(onnxruntime), OnnxReference()]


def products(shapes: Mapping[str, list[int | None]], model: ModelProto) -> int:
    """How many products the convolutions and matrix products of a model take, as far as shapes are known."""
    total = 0
    for node in model.graph.node:
        x, w, y = (shapes.get(name) for name in (*[*node.input, "", ""][:2], node.output[0]))
        if node.op_type == "Conv" and w and y:
            total += math.prod(each or 1 for each in y) * math.prod(each or 1 for each in w[1:])
        elif node.op_type in ("MatMul", "Gemm") and x and y:
            total += math.prod(each or 1 for each in y) * (x[-1] or 1)
    return total
