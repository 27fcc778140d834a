"""The device that kernels are made for: facts as data, found by `detect`.

Nothing here is a current-device global: a `Target` is passed along. Detection imports the CUDA driver bindings lazily.
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from schedsearch.errors import DeviceError, UsageError


@dataclass(frozen=True)
class Target:
    """Device facts. `key` identifies the kind of device (not the single card), so records serve all cards of a kind.

    Attributes:
        kind: cuda or cpu.
        name: as the driver or the kernel gives it.
        compute_capability: (major, minor); (0, 0) on a CPU.
        sms: multiprocessors; on a CPU the hardware threads that this process may use.
        shared_bytes_per_block, shared_bytes_per_sm, registers_per_sm, threads_per_sm: limits; 0 on a CPU.
        l2_bytes: the last-level cache.
        clock_khz, memory_bytes: as reported, for information only.
        ordinal, uuid: which card; not part of `key`.
        simd_bits: widest vector unit of a CPU; 0 on a GPU.
    """

    kind: Literal["cuda", "cpu"]
    name: str
    compute_capability: tuple[int, int] = (0, 0)
    sms: int = 1
    shared_bytes_per_block: int = 0
    shared_bytes_per_sm: int = 0
    registers_per_sm: int = 0
    threads_per_sm: int = 0
    l2_bytes: int = 0
    clock_khz: int = 0
    memory_bytes: int = 0
    simd_bits: int = 0
    ordinal: int = 0
    uuid: str = ""

    @property
    def key(self) -> str:
        """E.g. 'cuda:sm_90:132:NVIDIA H200' or 'cpu:avx512:2:<model name>'."""
        if self.kind == "cuda":
            return f"cuda:sm_{self.compute_capability[0]}{self.compute_capability[1]}:{self.sms}:{self.name}"
        return f"cpu:{self.simd_bits}:{self.sms}:{self.name}"

    def facts(self) -> dict[str, Any]:
        return asdict(self)


# For compiling without a device (NVIDIA's datasheets and occupancy tables).
PRESETS = {
    "a100": Target(
        "cuda", "NVIDIA A100-SXM4-80GB", (8, 0), 108, 166_912, 167_936, 65536, 2048, 40 << 20, 1_410_000, 80 << 30
    ),
    "h200": Target("cuda", "NVIDIA H200", (9, 0), 132, 232_448, 233_472, 65536, 2048, 60 << 20, 1_980_000, 141 << 30),
    "b200": Target("cuda", "NVIDIA B200", (10, 0), 148, 232_448, 233_472, 65536, 2048, 126 << 20, 1_965_000, 180 << 30),
}


def detect(selector: str = "auto", *, presets: bool = False) -> Target:
    """Finds a device.

    Args:
        selector: auto (a GPU where there is one, else the CPU), cpu, cuda, or cuda:N.
        presets: whether a name in `PRESETS` will do too, of a device that need not be here.

    Raises:
        UsageError: any other selector.
        DeviceError: a GPU was asked for and there is none, or its driver cannot be used.
    """
    if presets and selector in PRESETS:
        return PRESETS[selector]
    match = re.fullmatch(r"(auto|cpu|cuda)(?::(\d+))?", selector)
    if not match or (match[2] and match[1] != "cuda"):
        allowed = ["auto", "cpu", "cuda", "cuda:N", *(PRESETS if presets else ())]
        got = "stands for a device that need not be here, and this needs one" if selector in PRESETS else "is not known"
        raise UsageError(f"target {selector!r} {got}; allowed: {', '.join(allowed)}")
    if match[1] == "cpu":
        return _detect_cpu()
    try:
        return _detect_cuda(int(match[2] or 0))
    except DeviceError:
        if match[1] == "auto":
            return _detect_cpu()
        raise


def _detect_cuda(ordinal: int) -> Target:
    from schedsearch.device.cuda import describe_device

    return Target(kind="cuda", ordinal=ordinal, **describe_device(ordinal))


def _detect_cpu() -> Target:
    text = _read("/proc/cpuinfo")
    name = re.search(r"model name\s*:\s*(.+)", text)
    flags = re.search(r"flags\s*:\s*(.+)", text)
    words = flags[1].split() if flags else []
    simd_bits = 512 if "avx512f" in words else 256 if "avx2" in words else 128
    return Target(
        kind="cpu",
        name=" ".join(name[1].split()) if name else platform.machine(),
        sms=len(os.sched_getaffinity(0)),
        l2_bytes=_last_level_cache_bytes(),
        simd_bits=simd_bits,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )


def _last_level_cache_bytes() -> int:
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        match = re.fullmatch(r"(\d+)([KMG])", _read(path).strip())
        if match:
            sizes.append(int(match[1]) << {"K": 10, "M": 20, "G": 30}[match[2]])
    return max(sizes, default=32 << 20)


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
