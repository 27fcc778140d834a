"""Reads counters of a kernel with NVIDIA Nsight Compute: finds `ncu`, runs it, reads its CSV.

Options and format follow the "Nsight Compute CLI" manual; the names of metrics follow the "Kernel Profiling Guide".
"""

from __future__ import annotations

import contextlib
import csv
import os
import pickle
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from schedsearch.errors import DeviceError
from schedsearch.launch import Artifact
from schedsearch.measure.tools import run_tool
from schedsearch.measurement import HOT_GRAPH
from schedsearch.processes.scratch import ScratchFolder
from schedsearch.profiling.process import Request
from schedsearch.profiling.profile import METRICS, Launch, Profile
from schedsearch.target import Target
from schedsearch.workload import Workload

_TIMEOUT_S = 600.0
_TAIL_LINES = 6
# Where NVIDIA's packages put it if it is not on PATH. The newest version is taken.
_TOOLKITS = ("CUDA_HOME", "CUDA_PATH")
_INSTALLED = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")

_UNITS = {
    "byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12,
    "ns": 1.0, "nsecond": 1.0, "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6, "s": 1e9, "second": 1e9,
}  # fmt: skip


def find(path: str | None = None) -> str:
    """The program `ncu`.

    Args:
        path: its path; default: searched on PATH and where NVIDIA's packages put it.

    Raises:
        DeviceError: it is not installed.
    """
    if path is not None:
        if found := shutil.which(path):
            return found
        raise DeviceError(f"--ncu {path} cannot be run; give the path of Nsight Compute's ncu")
    toolkits = [str(Path(os.environ[name], "bin", "ncu")) for name in _TOOLKITS if os.environ.get(name)]
    for place in ("ncu", *toolkits, *_INSTALLED):
        candidates = sorted(map(str, Path("/").glob(place[1:])), key=_by_number) if "*" in place else [place]
        for candidate in reversed(candidates):
            if found := shutil.which(candidate):
                return found
    raise DeviceError(
        "Nsight Compute is not installed: no program ncu on PATH; it comes with the CUDA toolkit and as the package "
        "nsight-compute of NVIDIA's repositories; install it, or give its path: --ncu PATH"
    )


def _by_number(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text)]


def profile(workload: Workload, artifact: Artifact | None, target: Target, *, mode: str, ncu: str | None = None) -> Profile:
    """Runs a kernel under Nsight Compute. The caller holds the device's lock.

    Clocks are left alone (`--clock-control none`). Caches are flushed before each launch, but kept in mode hot-graph-v1.

    Args:
        artifact: the kernel; None profiles PyTorch's version of the operator.
        target: a CUDA device of this machine.
        mode: of the record's timing.
        ncu: see `find`.

    Raises:
        DeviceError: no ncu, no permission to read counters, or the profiled process failed.
    """
    program = find(ncu)
    cache = "kept" if mode == HOT_GRAPH else "flushed"
    environment = {**os.environ, "LC_ALL": "C"}  # numbers as 1,234.5 whatever the user's language
    if target.uuid:
        target, environment = replace(target, ordinal=0), {**environment, "CUDA_VISIBLE_DEVICES": target.uuid}
    tool = f"ncu {_version(program)}"
    with contextlib.closing(ScratchFolder("profile")) as folder:
        request = folder.path / "request"
        request.write_bytes(pickle.dumps(Request(target, workload, artifact)))
        asked, missing = list(METRICS), list[str]()
        while True:
            output = _run(_command(program, cache, asked, request), environment)
            unknown = _unknown(output, asked)
            if not unknown or len(unknown) == len(asked):
                break
            asked = [name for name in asked if name not in unknown]
            missing += unknown
    launches = _launches(output, asked)
    missing += [name for name in asked if not any(name in launch.metrics for launch in launches)]
    if artifact is not None and len(launches) != len(artifact.plan.steps):
        raise DeviceError(
            f"ncu saw {len(launches)} launches of a kernel of {len(artifact.plan.steps)} steps; {_tail(output)}"
        )
    return Profile(
        subject="torch" if artifact is None else "kernel",
        tool=tool,
        cache=cache,
        launches=tuple(launches),
        missing=tuple(missing),
        taken_at=time.time(),
    )


def _command(program: str, cache: str, metrics: Sequence[str], request: Path) -> list[str]:
    return [
        program, "--metrics", ",".join(metrics), "--csv", "--page", "raw", "--print-units", "base",
        "--clock-control", "none", "--cache-control", "none" if cache == "kept" else "all",
        "--profile-from-start", "off", "--target-processes", "all",
        sys.executable, "-P", "-m", "schedsearch.profiling.process", str(request),
    ]  # fmt: skip


def _run(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """The output of ncu on both streams."""
    _, output = run_tool(
        "ncu", command, environment, _TIMEOUT_S, if_missing="name another: --ncu PATH", if_slow="; is the device busy?"
    )
    return output


def _version(program: str) -> str:
    found = re.search(r"Version (\S+)", _run([program, "--version"], os.environ))
    return found[1] if found else "unknown"


def _unknown(output: str, asked: Sequence[str]) -> list[str]:
    """The metrics that ncu does not know, with or without suffix: '==ERROR== Failed to find metric regex:^name...'."""
    unknown: list[str] = []
    for line in output.replace("\\", "").splitlines():
        if "Failed to find metric" in line:
            exactly = [name for name in asked if _names(line, name)]
            unknown += exactly or [name for name in asked if _names(line, name.split(".")[0])]
    return list(dict.fromkeys(unknown))


def _names(line: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", line) is not None


def _launches(output: str, asked: Sequence[str]) -> list[Launch]:
    """The rows of `--csv --page raw`: a header, a row of units, one row per launch. Other lines come before and after.

    Raises:
        DeviceError: there are no rows; the message has the reason if ncu gives one.
    """
    if "ERR_NVGPUCTRPERM" in output:
        raise DeviceError(
            "the NVIDIA driver lets only administrators read performance counters (ERR_NVGPUCTRPERM); run as root, in a "
            "container with --cap-add SYS_ADMIN, or set the kernel module's option NVreg_RestrictProfilingToAdminUsers=0: "
            "https://developer.nvidia.com/ERR_NVGPUCTRPERM"
        )
    rows = list(csv.reader(line for line in output.splitlines() if line.startswith('"')))
    header = next((row for row in rows if row[0] == "ID"), None)
    if header is None:
        raise DeviceError(f"ncu profiled no kernel; {_tail(output)}")
    rows = [row for row in rows if len(row) == len(header) and row is not header]
    units = next((row for row in rows if not row[0]), [""] * len(header))
    launches = []
    for row in rows:
        if not row[0].isdigit():
            continue
        cells = dict(zip(header, row))
        metrics = {
            name: value * _UNITS.get(unit, 1.0)
            for name, unit, cell in zip(header, units, row)
            if name in asked and (value := _number(cell)) is not None
        }
        launches.append(Launch(cells["Kernel Name"], cells.get("Grid Size", ""), cells.get("Block Size", ""), metrics))
    if not launches:
        raise DeviceError(f"ncu profiled no kernel; {_tail(output)}")
    return launches


def _number(cell: str) -> float | None:
    """1,234.5 as a number; None for n/a, nan and counters that a card lacks."""
    text = cell.replace(",", "")
    return float(text) if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", text) else None


def _tail(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return f"it said: {' | '.join(lines[-_TAIL_LINES:])}" if lines else "it said nothing"
