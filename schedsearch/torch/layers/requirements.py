"""What must be there before kernels are tried: a device of theirs, a database, the importer of networks."""

from __future__ import annotations

from pathlib import Path

import torch

from schedsearch.errors import SchedsearchError, UsageError
from schedsearch.torch.layers.kernel_op import Kernels
from schedsearch.torch.refusal import Refusal


def check_kind(device: torch.device) -> None:
    """Raises Refusal for a device that there are no kernels for."""
    if device.type not in ("cpu", "cuda"):
        raise Refusal(f"the model is on {device}; allowed: a GPU of CUDA, or the CPU")
    if device.type == "cuda" and torch.version.hip is not None:
        raise Refusal("this PyTorch is for GPUs of AMD (ROCm); allowed: a PyTorch for CUDA, or a model on the CPU")


def reason_without_networks() -> str:
    """Why no network can be built here, with the remedy; empty if nothing that they need is missing."""
    from schedsearch.network.invalid import ModelError
    from schedsearch.network.model import needed

    try:
        needed()
    except ModelError as error:
        return f"no networks: {error}"
    return ""


def kernels_of(db: Path, device: torch.device, allow: tuple[str, ...], tune: bool) -> Kernels:
    if not db.exists() and not tune and not {"shipped", "default"} & set(allow):
        raise Refusal(f"there is no database {db}; tune first, e.g. optimize_(model, example, tune=True)")
    if not db.exists() and tune:
        from schedsearch.records.store import Store

        Store.open(db).close()
    try:
        return Kernels(db, device, allow)
    except UsageError:  # the caller's mistake
        raise
    except SchedsearchError as error:
        raise Refusal(str(error)) from error
