"""Finds the devices of this machine: `detect` returns a `Target`. It imports the CUDA driver bindings when it needs them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from schedsearch.errors import DeviceError, UsageError, did_you_mean
from schedsearch.target import PRESETS, Architecture, Target

_SEVERAL = re.compile(r"cuda:(all|\d+(?:,\d+)+)")
_IS_ONE = re.compile(r"auto|cpu|cuda(?::(\d+))?")
_ONE = ("auto", "cpu", "cuda", "cuda:N")  # selectors as messages list them


def detect(selector: str = "auto", *, presets: bool = False) -> Target:
    """Finds a device.

    Args:
        selector: auto (a GPU if there is one, else the CPU), cpu, cuda, or cuda:N.
        presets: whether to accept a name in `PRESETS` too; the device need not be present.

    Raises:
        UsageError: any other selector.
        DeviceError: a GPU was requested but there is none, or its driver cannot be used.
    """
    if presets and selector in PRESETS:
        return PRESETS[selector]
    match = _IS_ONE.fullmatch(selector)
    if not match:
        if _SEVERAL.fullmatch(selector):
            raise UsageError(f"target {selector!r} names several devices, and only tuning takes them; name one: cuda:N")
        raise _unknown(selector, [*_ONE, *(PRESETS if presets else ())])
    if selector == "cpu":
        return _detect_cpu()
    try:
        return _detect_cuda(int(match[1] or 0))
    except DeviceError:
        if selector == "auto":
            return _detect_cpu()
        raise


def detect_all(selector: str = "auto", *, presets: bool = False) -> list[Target]:
    """Finds the devices of one run: those that `detect` finds, and several GPUs.

    Args:
        selector: as of `detect`, or cuda:all, or the numbers of GPUs, e.g. cuda:0,2.

    Returns:
        GPUs in the order of their numbers, each once.

    Raises:
        UsageError, DeviceError: as `detect`.
    """
    several = _SEVERAL.fullmatch(selector)
    if several is None:
        if not _IS_ONE.fullmatch(selector) and not (presets and selector in PRESETS):
            raise _unknown(selector, [*_ONE, "cuda:N,M", "cuda:all", *(PRESETS if presets else ())])
        return [detect(selector, presets=presets)]
    if several[1] == "all":
        from schedsearch.device.cuda_driver import iterate_devices

        found = [Target(kind="cuda", ordinal=ordinal, **facts) for ordinal, facts in enumerate(iterate_devices())]
    else:
        found = [_detect_cuda(ordinal) for ordinal in sorted({int(number) for number in several[1].split(",")})]
    if not found:
        raise DeviceError("there is no GPU; give --target cpu")
    return found


def _unknown(selector: str, allowed: Sequence[str]) -> UsageError:
    if selector.lower() in PRESETS and selector.lower() not in allowed:
        got = "stands for a device that may be absent, but a real device is needed here"
    else:
        got = _architecture(selector, allowed) or f"is not known{did_you_mean(selector, allowed)}"
    return UsageError(f"target {selector!r} {got}; allowed: {', '.join(allowed)}")


def _architecture(selector: str, allowed: Sequence[str]) -> str:
    """What to say of a selector that names an architecture; empty if it names none."""
    try:
        found = Architecture.parse(selector)
    except ValueError:
        return ""
    cards = [name for name, card in PRESETS.items() if name in allowed and found.runs_on(card.compute_capability)]
    said = f" (cards that run its code: {', '.join(cards)})" if cards else ""
    return f"is an architecture, not a device{said}"


def _detect_cuda(ordinal: int) -> Target:
    from schedsearch.device.cuda_driver import describe_device

    return Target(kind="cuda", ordinal=ordinal, **describe_device(ordinal))


def _detect_cpu() -> Target:
    text = _read("/proc/cpuinfo")
    name = re.search(r"model name\s*:\s*(.+)", text)
    flags = re.search(r"flags\s*:\s*(.+)", text)
    words = flags[1].split() if flags else []
    simd_bits = 512 if "avx512f" in words else 256 if "avx2" in words else 128
    return Target(
        kind="cpu",
        name=" ".join(name[1].split()) if name else os.uname().machine,
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
