"""Torch modules as the graphs that ONNX files become."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from schedsearch.errors import first_line, root_cause
from schedsearch.network.invalid import ModelError
from schedsearch.network.model import needed, simplified

if TYPE_CHECKING:
    import onnx_ir as ir


def export(module: object, example: object) -> ir.Model:
    """The simplified graph of a torch module, by torch.export.

    The module is read as it computes in evaluation mode; its own mode does not change.

    Args:
        module: a torch.nn.Module.
        example: its input, or a tuple of several. Their shapes become those of the network.

    Raises:
        ModelError: torch, onnx-ir or onnxscript is not installed, the module cannot be exported or returns other things than
            tensors, or its graph cannot be compiled.

    Examples:
        >>> network = lower(export(module, torch.randn(1, 3, 224, 224)), dtype="float16")
    """
    return simplified(exported(module, example).model, type(module).__name__)


def exported(module: Any, example: Any) -> Any:
    """The `torch.onnx.ONNXProgram` of a module as the exporter made it. Raises ModelError as `export`."""
    needed()
    try:
        import torch
    except ImportError as error:
        raise ModelError(f"a torch module needs PyTorch ({error})") from error
    arguments = example if isinstance(example, tuple) else (example,)
    training = module.training
    name = type(module).__name__
    try:
        with torch.no_grad():
            program = torch.onnx.export(module.eval(), arguments, dynamo=True, optimize=False, verbose=False)
    except Exception as error:  # torch's exporters raise many kinds
        if (other := _not_a_tensor(module, arguments)) is not None:
            raise ModelError(
                f"{name} returns {other!r}, of type {type(other).__name__}; allowed: tensors, None, and tuples, lists and "
                "dictionaries of these"
            ) from error
        reason = first_line(root_cause(error))  # the errors around it tell how to report a bug of PyTorch
        raise ModelError(f"torch.export cannot read {name}: {reason}") from error
    finally:
        module.train(training)
    if program is None or not program.model.graph.outputs:
        raise ModelError(f"{name} returns no tensor; there is nothing to compile")
    return program


def _not_a_tensor(module: Any, arguments: tuple[Any, ...]) -> Any:
    """What a module returns, alone or within a collection, that is neither a tensor nor None; None if there is no such."""
    import torch
    from torch.utils import _pytree

    try:
        with torch.no_grad():
            leaves, _ = _pytree.tree_flatten(module(*arguments))
    except Exception:  # a module may raise anything; the exporter's error tells more
        return None
    return next((leaf for leaf in leaves if leaf is not None and not isinstance(leaf, torch.Tensor)), None)
