"""The errors of models that cannot be read or compiled."""

from __future__ import annotations

from schedsearch.errors import UsageError

IN_ONNX_RUNTIME = "in ONNX Runtime: build with --fallback onnxruntime (in Python fallback='onnxruntime')"
BY_CALL = "Let each call decide these sizes: build with --run-mode exact (in Python run_mode='exact')"


class ModelError(UsageError):
    """A model file cannot be read, or its graph cannot be compiled."""


class UnknownShapeError(ModelError):
    """A node reads or makes an array whose shape is not known when the model is read."""


class NoOperatorError(ModelError):
    """Nodes of a model have no operator.

    Attributes:
        nodes: what they are, without a remedy, for callers that run them in another way.
    """

    def __init__(self, nodes: str, remedy: str | None = None) -> None:
        """`remedy`: None: ONNX Runtime."""
        self.nodes = nodes
        if remedy is None:
            remedy = f"Run them {IN_ONNX_RUNTIME}"
        super().__init__(f"{nodes}. {remedy}" if remedy else nodes)
