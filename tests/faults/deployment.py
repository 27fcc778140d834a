"""Deployment as the fuzzers see it: whatever a database holds, no foreign code is loaded and no wrong result is served."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
from conv2d_numpy import numpy_conv2d

import schedsearch
from schedsearch.backend import CompileError
from schedsearch.backend import cpu as cpu_backend
from schedsearch.device.cpu import CpuDevice
from schedsearch.errors import NoRecordError, SchedsearchError
from schedsearch.launch import Artifact
from schedsearch.workload import Workload

from . import sample_database
from .commands import check_error
from .fuzzing import Broken


class Deployment:
    """Asks for the kernels of the sample database.

    From the first `check` on, this process (a worker) notes the code that a CPU device is given, before any of it runs, and
    has no compiler: what is served is stored code.
    """

    def __init__(self, code_of: dict[str, frozenset[str]]) -> None:
        self._code_of = code_of
        self._calls = [operands(workload) for workload in sample_database.SERVED]
        self._loaded: list[str] = []
        self._watching = False

    def _watch(self) -> None:
        if self._watching:
            return
        self._watching = True
        load = CpuDevice.load

        def noting(device: CpuDevice, artifact: Artifact) -> Any:
            self._loaded.append(artifact.sha256)
            return load(device, artifact)

        CpuDevice.load = noting  # type: ignore[method-assign]
        cpu_backend.compile_cpu = _no_compiler

    def check(self, path: Path, random: random.Random) -> str:
        """Asks for each kernel, and calls what is served.

        Raises:
            Broken: code was loaded that was not made for the workload, or the kernel was never verified.
            AssertionError: the kernel computes wrong values.
        """
        self._watch()
        words = []
        for workload, (arguments, wanted) in zip(sample_database.SERVED, self._calls):
            self._loaded.clear()
            try:
                allow = random.choice((("exact",), ("exact", "same_architecture")))
                with schedsearch.compile(workload, path, target="cpu", allow=allow) as kernel:
                    got = kernel(**arguments)
                    if not kernel.verified:
                        raise Broken(f"a kernel of level {kernel.level} that was never verified is served")
            except NoRecordError as error:
                check_error(error, (), "compile")
                words.append("no record")
            except SchedsearchError as error:
                check_error(error, (path.name,), "compile")
                words.append("refused")
            else:
                np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)
                words.append("served")
            if foreign := set(self._loaded) - self._code_of[workload.id]:
                raise Broken(f"code that was not made for the workload was loaded: {', '.join(foreign)}")
        return f"deployment {' and '.join(sorted(set(words)))}"


def _no_compiler(source: Any) -> Any:
    raise CompileError("this campaign builds no kernels")


def operands(workload: Workload) -> tuple[dict[str, Any], Any]:
    """Random arguments, and what the workload computes of them, by NumPy."""
    rng = np.random.default_rng(7)
    arguments = {spec.name: rng.standard_normal(spec.shape).astype(np.float32) for spec in workload.signature}
    return arguments, numpy_conv2d(workload, arguments, {})
