"""A convolution with a record on this CPU, its arguments, and what it computes."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import numpy as np
from conv2d_numpy import numpy_conv2d

import schedsearch

CPU_WORKLOAD = schedsearch.Workload.conv2d(
    n=2, h=9, w=8, c=8, k=16, r=3, s=3, padding=1, dtype="float32", epilogue=("bias", "leaky_relu")
)
GPU_WORKLOAD = schedsearch.Workload.conv2d(n=2, h=9, w=8, c=16, k=24, r=3, s=3, padding=1, epilogue=("bias", "relu"))


def tuned_database(folder: Path) -> Path:
    """A database in a folder, with a record of `CPU_WORKLOAD` for this machine."""
    db = folder / "records.db"
    db.write_bytes(_tuned())
    return db


@functools.cache
def _tuned() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        db, task = Path(folder) / "records.db", schedsearch.Task(CPU_WORKLOAD, restrict={"threads": [1]})
        schedsearch.tune([task], db, target="cpu", trials=2, tuner="random")
        return db.read_bytes()


def operands(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = [arg.shape for arg in CPU_WORKLOAD.signature]
    x, weight, bias = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return x, weight, bias


def expected(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, slope: float = 0.01) -> np.ndarray:
    arguments = {"x": x, "weight": weight, "bias": bias}
    return numpy_conv2d(CPU_WORKLOAD, arguments, {"leaky_relu_slope": slope})
