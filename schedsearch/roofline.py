"""How fast a kernel can be at all: the roofline of a device, from the text of its target key.

    time >= max(launch, flops / peak arithmetic, bytes / bandwidth)

`least_time_ns` is generous: every correct kernel takes longer, on every card that has this key. A shorter time is an error
of the measurement or of the kernel. `suspect_time_ns` is close to what the hardware reaches. A kernel may beat it, for
example with an algorithm that needs fewer multiplications, but a kernel that leaves work out beats it too: look at it twice.

Peaks are those of the fastest path for the operands' width: dense tensor cores (never sparse ones), one byte at twice the
rate of two bytes, four and eight bytes at half of it. They are counted per clock and multiprocessor.

Sources: the whitepapers of NVIDIA's architectures (V100, Turing, A100, GA102, Ada, H100, Blackwell) and the CUDA C++
Programming Guide for operations per clock; data sheets of boards for clocks and memory; the Intel Optimization Reference
Manual for CPUs.

See docs/decisions/036-roofline-bounds.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from schedsearch.errors import WorkloadError
from schedsearch.measurement import COLD_GRAPH
from schedsearch.ops.dtypes import dtype
from schedsearch.workload import Workload

_STRASSEN = (
    2.0  # five levels of Strassen's algorithm save 1 - (7/8)^5 = 49 % of the multiplications; nobody uses more than two
)
_CLOCK_MARGIN = 1.1
_MEMORY_MARGIN = 1.25
_MOST_SETS = (
    1024  # of operands, which a cold measurement rotates over; they fill 2.5 times the L2 cache unless they are this many
)
_ROTATED = 2.5


@dataclass(frozen=True)
class _Arch:
    """A CUDA architecture.

    Attributes:
        flops: dense operations on 16-bit operands, per clock and multiprocessor.
        ghz: the highest boost clock of its boards.
        memory_gbs: the highest memory bandwidth of its boards, in 10^9 bytes per second.
        l2_bytes: the largest L2 cache of its boards.
    """

    flops: int
    ghz: float
    memory_gbs: float
    l2_bytes: int


_ARCHES = {
    "70": _Arch(1024, 1.93, 1134, 6 << 20),  # V100, V100S, Titan V
    "72": _Arch(1024, 1.40, 137, 6 << 20),
    "75": _Arch(1024, 2.16, 672, 6 << 20),  # T4, RTX 20, Titan RTX
    "80": _Arch(2048, 1.44, 2040, 40 << 20),  # A100, A30
    "86": _Arch(1024, 2.10, 1008, 6 << 20),  # A10, A40, RTX 30
    "87": _Arch(2048, 1.30, 205, 4 << 20),
    "89": _Arch(1024, 3.10, 1008, 96 << 20),  # L4, L40S, RTX 40
    "90": _Arch(4096, 1.98, 4900, 60 << 20),  # H100, H200, GH200
    "100": _Arch(8192, 2.10, 8000, 128 << 20),  # B200, GB200
    "103": _Arch(8192, 2.10, 8000, 192 << 20),  # B300, GB300
    "120": _Arch(1024, 3.30, 1792, 128 << 20),  # RTX 50, RTX PRO 6000
}
_UNKNOWN_ARCH = _Arch(65_536, 4.0, 40_000, 1 << 30)

_BOARD_GBS = {  # the first name that occurs in the card's counts
    "B300": 8000, "B200": 8000, "GH200": 4900, "H200": 4800, "H100 NVL": 3938, "H100 PCIe": 2039, "H100": 3352,
    "A100-SXM4-40GB": 1555, "A100-PCIE-40GB": 1555, "A100": 2039, "A30": 933, "A40": 696, "A10": 600, "RTX A6000": 768,
    "L40S": 864, "L40": 864, "L4": 300, "V100S": 1134, "V100": 900, "T4": 320, "RTX 3090": 936, "RTX 4090": 1008,
    "RTX 5090": 1792,
}  # fmt: skip


@dataclass(frozen=True)
class _Roof:
    """Attributes:
    launch_ns: no launch takes less.
    flops_per_ns: on operands of two bytes.
    cache_bytes_per_ns: between the multiprocessors (the cores of a CPU) and the last-level cache.
    memory_bytes_per_ns, l2_bytes: of the card; a bandwidth of 0 is not known, and only the cache then counts.
    """

    launch_ns: float
    flops_per_ns: float
    cache_bytes_per_ns: float
    memory_bytes_per_ns: float = 0.0
    l2_bytes: int = 0


def least_time_ns(workload: Workload, target_key: str, mode: str = COLD_GRAPH) -> float:
    """The time that no correct kernel can beat, in ns.

    It counts only the work that no algorithm avoids, as the operator says (`Work.least_flops`, `Work.least_bytes`), and
    every output once. All peaks have margins: the highest boost clock of the architecture and 10 %, the fastest memory and
    25 %, twice the bandwidth of the L2 cache, half of the multiplications (Strassen). Unknown devices have the most generous
    peaks.

    Args:
        target_key: see `Target.key`; any other text gives the bound of an unknown device.
        mode: of the measurement. Only `cold-graph-v1` finds operands in memory. Its sets fill 2.5 times the L2 cache, so
            that at most one cache's worth of a rotation is still there.

    Examples:
        >>> from schedsearch import conv2d
        >>> least_time_ns(conv2d(n=1, h=8, w=8, c=16, k=16, r=1, s=1), "cuda:sm_90:132:NVIDIA H200")
        300.0
    """
    roof = _roof(target_key, generous=True)
    try:
        work, outputs = workload.work, sum(output.nbytes for output in workload.outputs if not output.extents)
        operands = sum(spec.nbytes for spec in (*workload.signature, *workload.outputs))
    except WorkloadError:  # only another tuner knows what it computes
        return roof.launch_ns
    flops = work.least_flops / _STRASSEN
    nbytes = outputs if mode != COLD_GRAPH else max(outputs, work.least_bytes)
    return _time_ns(roof, workload, mode, flops, nbytes, operands)


def suspect_time_ns(workload: Workload, target_key: str, mode: str = COLD_GRAPH) -> float:
    """The time below which a kernel is suspect, in ns; never below `least_time_ns`.

    It counts every operation of the definition, and once each byte that a kernel must touch, at the data sheets' peaks.

    Args:
        target_key, mode: see `least_time_ns`.
    """
    roof = _roof(target_key, generous=False)
    least_ns = least_time_ns(workload, target_key, mode)
    try:
        operands = sum(spec.nbytes for spec in (*workload.signature, *workload.outputs))
    except WorkloadError:
        return least_ns
    nbytes = workload.work.least_bytes or workload.min_bytes
    return max(least_ns, _time_ns(roof, workload, mode, workload.flops, nbytes, operands))


def has_peaks(target_key: str) -> bool:
    """Whether the peaks of a device are those of its data sheet, so that a share of `suspect_time_ns` says something.

    The bound of a CPU holds for every CPU with so many threads, at a clock that hardly any has; that of an unlisted card
    is the bound of the fastest one of its architecture.

    Example:
        >>> has_peaks("cuda:sm_90:132:NVIDIA H200"), has_peaks("cpu:512:2:AMD EPYC")
        (True, False)
    """
    cuda = re.match(r"cuda:sm_(\d{2,3}):\d{1,6}:(.*)", target_key, re.DOTALL)
    return cuda is not None and cuda[1] in _ARCHES and any(board in cuda[2] for board in _BOARD_GBS)


def _time_ns(roof: _Roof, workload: Workload, mode: str, flops: float, nbytes: float, operands: int) -> float:
    """Args:
    flops, nbytes: of one launch.
    operands: bytes of one set of all operands.
    """
    times = [roof.launch_ns, flops / (roof.flops_per_ns * _speed(workload)), nbytes / roof.cache_bytes_per_ns]
    cold = mode == COLD_GRAPH and operands * _MOST_SETS >= _ROTATED * roof.l2_bytes
    if cold and roof.memory_bytes_per_ns:
        missed = nbytes - operands / _ROTATED  # a rotation's sets fill 2.5 caches; the cache keeps one of these
        times.append(missed / roof.memory_bytes_per_ns)
    return max(times)


def _speed(workload: Workload) -> float:
    """Peak arithmetic on the operands' format, relative to formats of two bytes."""
    factors = [spec for spec in workload.signature if spec.role == "factor"] or list(workload.signature)
    width = min((dtype(spec.dtype).nbytes for spec in factors), default=1)
    return 2.0 if width == 1 else 1.0 if width == 2 else 0.5


def _roof(target_key: str, *, generous: bool) -> _Roof:
    cuda = re.match(r"cuda:sm_(\d{2,3}):(\d{1,6}):(.*)", target_key, re.DOTALL)
    if cuda:
        return _cuda_roof(_ARCHES.get(cuda[1], _UNKNOWN_ARCH), int(cuda[2]), cuda[3], generous)
    cpu = re.match(r"cpu:(\d{1,6}):(\d{1,6}):", target_key)
    if cpu:
        return _cpu_roof(int(cpu[1]), int(cpu[2]), generous)
    return _Roof(10.0, 1e9, 1e9)


def _cuda_roof(arch: _Arch, sms: int, name: str, generous: bool) -> _Roof:
    """A multiprocessor reads at most 64 bytes per clock from the L2 cache. In a graph one launch follows another within
    about a microsecond."""
    clocks_per_ns = max(sms, 1) * arch.ghz * (_CLOCK_MARGIN if generous else 1.0)
    memory = arch.memory_gbs * _MEMORY_MARGIN
    if not generous:
        memory = next((gbs for board, gbs in _BOARD_GBS.items() if board in name), arch.memory_gbs)
    return _Roof(
        300.0 if generous else 700.0,
        arch.flops * clocks_per_ns,
        (128 if generous else 64) * clocks_per_ns,
        memory,
        arch.l2_bytes,
    )


def _cpu_roof(simd_bits: int, threads: int, generous: bool) -> _Roof:
    """A core multiplies and adds twice per clock over its whole vector; matrix units (AMX, SME) do 2048 operations on
    16-bit formats. Its caches give at most three vectors of 64 bytes per clock."""
    clocks_per_ns = max(threads, 1) * 6.5
    vector = 2 * 2 * max(simd_bits, 128) / 16
    return _Roof(10.0 if generous else 100.0, (2048 if generous else vector) * clocks_per_ns, 192 * clocks_per_ns)
