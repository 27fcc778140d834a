"""Runs a kernel under NVIDIA's compute-sanitizer: reads and writes outside of arrays that change no result.

Verification sees a wrong write near an array and a wrong read that changes an output. The sanitizer sees every access. It
slows a kernel down 10 to 100 times, so it is for kernels that will be served.

Each array is an allocation of its own of the exact size, because the sanitizer knows allocations only.

Options and output follow the "Compute Sanitizer" manual.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from schedsearch.device import open_device
from schedsearch.errors import DeviceError, SchedsearchError, UnsupportedError, UsageError
from schedsearch.launch import Artifact
from schedsearch.measure.lock import DeviceLock
from schedsearch.measure.recheck import machine_code
from schedsearch.measure.tools import run_tool
from schedsearch.measurement import MODES, Record
from schedsearch.processes.builder import Builder, Built
from schedsearch.target import Target
from schedsearch.verification.inputs import timing_pattern
from schedsearch.workload import Workload

if TYPE_CHECKING:
    from schedsearch.records.store import Store

TOOLS = ("memcheck", "initcheck", "racecheck", "synccheck")
_TIMEOUT_S = 900.0
_FOUND, _LAUNCHED = 86, "schedsearch: launched"
_TEXT_LINES = 8
_TOOLKITS = ("CUDA_HOME", "CUDA_PATH")
_INSTALLED = ("/usr/local/cuda/bin/compute-sanitizer", "/usr/local/cuda/compute-sanitizer/compute-sanitizer")


@dataclass(frozen=True)
class Sanitized:
    """A best record whose kernel was run under a tool. `finding` is empty if the tool found nothing."""

    record_id: int
    record: Record
    tool: str
    finding: str


def find(path: str | None = None) -> str:
    """The program compute-sanitizer.

    Args:
        path: its path; default: searched on PATH and where the CUDA toolkit puts it.

    Raises:
        DeviceError: it is not installed.
    """
    toolkits = [str(Path(os.environ[name], "bin", "compute-sanitizer")) for name in _TOOLKITS if os.environ.get(name)]
    for place in [path] if path else ["compute-sanitizer", *toolkits, *_INSTALLED]:
        if found := shutil.which(place):
            return found
    raise DeviceError(
        f"compute-sanitizer is not installed: {path or 'no such program on PATH or in the CUDA toolkit'}; it comes with the "
        "CUDA toolkit and as the package cuda-sanitizer of NVIDIA's repositories; install it, or leave out --sanitize"
    )


def sanitize_bests(
    store: Store, target: Target, tool: str, *, wait: bool = True, on_wait: Callable[[str], None] | None = None
) -> Iterator[Sanitized]:
    """Runs the kernel of every best record of a target under a tool of compute-sanitizer. A best with a finding is demoted.

    It runs the stored code. If none is stored, or this machine does not vouch for it, it builds the configuration again.

    Args:
        store: opened for writing.
        tool: one of `TOOLS`.
        wait, on_wait: see `DeviceLock`.

    Raises:
        UnsupportedError: the target is not a GPU.
        UsageError: the tool is unknown.
        DeviceError: compute-sanitizer is not installed or fails; the kernel cannot be loaded.
    """
    if target.kind != "cuda":
        raise UnsupportedError(f"compute-sanitizer needs a CUDA device, got {target.name}; choose one: --target cuda")
    if tool not in TOOLS:
        raise UsageError(f"compute-sanitizer has no tool {tool!r}; allowed: {', '.join(TOOLS)}")
    program = find()
    with contextlib.closing(DeviceLock(target, wait=wait, on_wait=on_wait)):
        for mode in MODES:
            yield from _sanitize_mode(store, target, tool, mode, program)


def _sanitize_mode(store: Store, target: Target, tool: str, mode: str, program: str) -> Iterator[Sanitized]:
    if bests := list(store.bests(target=target.key, mode=mode)):
        with Builder(target, workers=1, mode=mode) as builder:
            for best in bests:
                built = machine_code(store, builder, best)
                if not isinstance(built, Built):
                    raise DeviceError(
                        f"record {best.record_id} no longer builds ({built.message}); tune this workload again"
                    )
                finding = sanitize(best.record.workload, built.artifact, target, tool, program)
                if finding:
                    store.demote(best.record)
                yield Sanitized(best.record_id, best.record, tool, finding)


def sanitize(workload: Workload, artifact: Artifact, target: Target, tool: str, program: str) -> str:
    """What the tool finds in one launch of a kernel, as the first lines of its report; empty if nothing.

    Raises:
        DeviceError: the tool or the kernel could not be run at all.
    """
    environment = {**os.environ, "LC_ALL": "C"}
    if target.uuid:
        target, environment = replace(target, ordinal=0), {**environment, "CUDA_VISIBLE_DEVICES": target.uuid}
    with tempfile.TemporaryDirectory(prefix="schedsearch-sanitize-") as folder:
        request = Path(folder, "request")
        request.write_bytes(pickle.dumps((target, workload, artifact)))
        command = [
            program, "--tool", tool, "--error-exitcode", str(_FOUND), "--print-limit", "20", "--target-processes", "all",
            sys.executable, "-P", "-m", "schedsearch.measure.sanitizer", str(request),
        ]  # fmt: skip
        code, output = run_tool(
            "compute-sanitizer", command, environment, _TIMEOUT_S, if_missing="install compute-sanitizer again"
        )
    report = _report(output)
    if code == _FOUND or (report and _errors(output)):
        return "\n".join(report[:_TEXT_LINES]) or f"{tool} found an error and does not say which"
    if code or _LAUNCHED not in output:
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        said = " | ".join(lines[-_TEXT_LINES:]) or "nothing"
        raise DeviceError(f"compute-sanitizer {tool} failed with exit code {code}; it said: {said}")
    return ""


def _report(output: str) -> list[str]:
    """The sanitizer's own lines, which begin with =========, without its banner and without stacks of the host."""
    lines = [line.removeprefix("=========").strip() for line in output.splitlines() if line.startswith("=========")]
    noise = re.compile(r"COMPUTE-SANITIZER|Host Frame|Saved host backtrace|(ERROR|RACECHECK) SUMMARY: 0 ")
    return [line for line in lines if line and not noise.search(line)]


def _errors(output: str) -> int:
    """The number in 'ERROR SUMMARY: 2 errors', or the errors in 'RACECHECK SUMMARY: 3 hazards displayed (2 errors, ...)'."""
    counts = re.findall(r"ERROR SUMMARY: (\d+)|RACECHECK SUMMARY:.*?\((\d+) error", output)
    return sum(int(one or other) for one, other in counts)


def launch_once(target: Target, workload: Workload, artifact: Artifact) -> None:
    """Launches every step of an artifact once. Each array has an allocation of its exact size; outputs are not initialised.

    Raises:
        DeviceError, PlanError: the artifact cannot be loaded or launched, or fails on the device.
    """
    artifact.plan.check(workload)
    with contextlib.closing(open_device(target)) as device:
        addresses = {}
        for spec in (*workload.signature, *workload.outputs):
            addresses[spec.name] = device.allocate(spec.span_bytes)
        for spec in workload.signature:
            timing_pattern(workload, spec).write(device, addresses[spec.name], spec.size)
        device.synchronize()
        kernel = device.load(artifact)
        kernel.bind(addresses, {scalar.name: scalar.default for scalar in workload.scalars}).launch()
        device.synchronize()
        kernel.close()


def main() -> None:
    target, workload, artifact = pickle.loads(Path(sys.argv[1]).read_bytes())
    try:
        launch_once(target, workload, artifact)
    except SchedsearchError as error:
        sys.exit(str(error))
    print(_LAUNCHED)


if __name__ == "__main__":
    main()
