"""What the tests of the record store share: records of every outcome, artifacts, and a way to lose root's rights."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from child_environment import child_environment

from schedsearch.config import Config
from schedsearch.launch import Artifact, Grid, Int32, LaunchPlan, Pointer, Step, TensorMap
from schedsearch.measurement import Anchor, Measurement, Outcome, Record, Resources
from schedsearch.profiling.profile import Launch, Profile
from schedsearch.workload import Workload

H200 = "cuda:sm_90:132:NVIDIA H200"
H100 = "cuda:sm_90:114:NVIDIA H100 PCIe"
A100 = "cuda:sm_80:108:NVIDIA A100-SXM4-80GB"
TOOLCHAIN = {"numba-cuda": "0.30.4", "nvjitlink": "13.0.88", "driver": "580.65"}


def conv(**changes: Any) -> Workload:
    return Workload.conv2d(**{"n": 1, "h": 14, "w": 14, "c": 64, "k": 64, "r": 3, "s": 3, "padding": 1, **changes})


def record(time_ns: float | None = 1000.0, outcome: Outcome = Outcome.OK, **changes: Any) -> Record:
    """A record with every field filled in; `time_ns` counts for ok only."""
    number = changes.pop("number", 0)
    measurement = changes.pop("measurement", None) or Measurement(
        outcome=outcome,
        mode=changes.pop("mode", "cold-graph-v1"),
        times_ns=(time_ns, time_ns * 1.1, time_ns * 0.9) if outcome is Outcome.OK and time_ns else (),
        resources=Resources(registers=128, shared_bytes=49152, local_bytes=8, spill_bytes=0, code_bytes=9000),
        max_error=0.125 if outcome.is_verified else None,
        message="" if outcome is Outcome.OK else "ptxas: something is wrong\n  with “this” kernel",
        build_s=0.75,
        run_s=0.1,
        clocks={"sm_mhz": 1980, "throttle": "none"},
        host="node7",
        device_uuid="GPU-6e1c8a3d-0000-0000-0000-000000000001",
    )
    values: dict[str, Any] = {
        "workload": conv(),
        "target": H200,
        "template": "conv2d_wgmma",
        "template_version": 1,
        "config": Config(bm=128, bn=64, swizzle=True, order="row", number=number),
        "measurement": measurement,
        "toolchain": TOOLCHAIN,
        "run": "20250101T000000-00000000",
        "batch": 3,
        "prediction": 0.1,
        "started_at": 1.7e9 + number / 8,
        "finished_at": 1.7e9 + number / 8 + 0.5,
        "model": 2,
        "anchor": Anchor("c0ffee", 4000.0),
    }
    return Record(**{**values, **changes})


def before_version_3(record: Record) -> Record:
    """The same record without the fields that schema version 3 brought."""
    return replace(record, measurement=replace(record.measurement, host="", device_uuid=""), model=None, anchor=None)


def artifact(text: bytes = b"\x7fELF code", arch: str = "sm_90a") -> Artifact:
    tensor_map = TensorMap(
        "x", "float16", (64, 14, 14, 1), (128, 1792, 25088), (1, 1, 1, 1), box=(64, 8, 8, 1), swizzle_bytes=128
    )
    params = (tensor_map, Pointer("weight"), Pointer("y"), Int32(3))
    step = Step("conv", params, Grid(98, blocks_per_sm=1), block_threads=384, dynamic_shared_bytes=200_000, cluster=2)
    return Artifact(text, LaunchPlan("cuda", arch, (step,), workspaces={"scratch": 4096}, alignments={"x": 16}))


def profile(duration_ns: float = 12_345.0) -> Profile:
    """Two launches, the first three times as long as the second."""
    launches = tuple(
        Launch(
            kernel,
            "(132, 1, 1)",
            "(384, 1, 1)",
            {"gpu__time_duration.sum": time_ns, "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": percent},
        )
        for kernel, time_ns, percent in (("conv", 0.75 * duration_ns, 80.0), ("reduce", 0.25 * duration_ns, 0.0))
    )
    return Profile("kernel", "ncu 2025.3.1.0", "flushed", launches, missing=("lts__t_bytes.sum",), taken_at=1.75e9)


def python(code: str, *arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
    """Starts another Python process that can import this module."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=child_environment(), **options)


def forked(action: Callable[[], str], *, drop_root: bool = False) -> str:
    """Runs `action` in a forked process, which may not override file permissions if wanted, and returns its text."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            if drop_root and os.getuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            text = action()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text
