"""Tuned kernels in PyTorch: for whole models, as functions, and the operators `torch.ops.schedsearch` behind them.

    report = schedsearch.torch.optimize_(model, example, db="records.db")

    import schedsearch.torch as sst

    sst.use("records.db")
    y = sst.conv2d(x, weight, bias, padding=1, activation="relu")

Raises ImportError if PyTorch is not installed or too old; the message says which version is needed.
"""

from __future__ import annotations

OLDEST = (2, 9)


def _require_torch() -> None:
    needed = f"schedsearch.torch needs PyTorch {OLDEST[0]}.{OLDEST[1]} or newer; install schedsearch[torch]"
    try:
        import torch
    except ImportError as error:
        raise ImportError(f"{needed} ({error})") from error
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < OLDEST:
        raise ImportError(f"{needed} (this is {torch.__version__})")


_require_torch()

from schedsearch.ops.epilogues import Epilogue  # noqa: E402
from schedsearch.torch.layers.report import LayerReport, NetworkReport, Report  # noqa: E402
from schedsearch.torch.models.optimize import optimize_, revert_  # noqa: E402
from schedsearch.torch.operators.causal import causal_conv1d, causal_conv1d_update  # noqa: E402
from schedsearch.torch.operators.functional import (  # noqa: E402
    conv2d,
    depthwise_conv2d,
    layout_transform,
    pixel_shuffle,
    pixel_unshuffle,
    quantized_conv2d,
)
from schedsearch.torch.operators.store import Served, Store, refresh, served, use  # noqa: E402

__all__ = [
    "Epilogue",
    "LayerReport",
    "NetworkReport",
    "Report",
    "Served",
    "Store",
    "causal_conv1d",
    "causal_conv1d_update",
    "conv2d",
    "depthwise_conv2d",
    "layout_transform",
    "optimize_",
    "pixel_shuffle",
    "pixel_unshuffle",
    "quantized_conv2d",
    "refresh",
    "revert_",
    "served",
    "use",
]
