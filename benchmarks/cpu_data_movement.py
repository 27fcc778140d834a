"""data_movement_cpu against memcpy of as many bytes, NumPy and PyTorch, in one run.

    python benchmarks/cpu_data_movement.py [--configs N] [--rounds N] [--draws N] [--seed N] [--out FILE.json]

Every configuration's result is compared bit for bit with NumPy. Times are the best of `--rounds` launches; the kernels and
their peers take turns, so that they meet the same disturbances. memcpy moves half of the bytes that the operator reads and
writes, on one thread and on all, and the faster of the two counts. `--draws` adds transpositions and blocks of pixels that
are drawn from the seed. On a machine with other load the shares vary by a fifth.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import common
import numpy as np

from schedsearch import concat, depth_to_space, pad, space_to_depth, strided_slice, transpose
from schedsearch.backend import compile_source
from schedsearch.config import Config
from schedsearch.device import open_device
from schedsearch.device.detect import detect
from schedsearch.target import Target
from schedsearch.templates.data_movement.cpu import DataMovementCpu
from schedsearch.workload import Workload

HEADER = ("workload", "MB", "best us", "default us", "memcpy us", "memcpy/best", "NumPy us", "PyTorch us")
_MEMCPY = ctypes.CDLL(None).memcpy
_MEMCPY.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def chosen() -> list[Workload]:
    """Each operator; runs that stay and runs that cross; 1, 2 and 4 bytes."""
    return [
        transpose(x=(16, 112, 112, 64), permutation=(0, 3, 1, 2), dtype="float16"),
        transpose(x=(16, 64, 112, 112), permutation=(0, 2, 3, 1), dtype="float16"),
        transpose(x=(16, 64, 112, 112), permutation=(0, 2, 3, 1), dtype="float32"),
        transpose(x=(32, 64, 112, 112), permutation=(0, 2, 3, 1), dtype="int8"),
        transpose(x=(64, 3, 224, 224), permutation=(0, 2, 3, 1), dtype="uint8"),
        transpose(x=(8, 512, 12, 64), permutation=(0, 2, 1, 3), dtype="float32"),
        depth_to_space(n=1, c=48, h=720, w=1280, block=4, mode="CRD", layout="NHWC"),
        depth_to_space(n=1, c=48, h=720, w=1280, block=4, mode="DCR", layout="NHWC"),
        depth_to_space(n=1, c=48, h=720, w=1280, block=4, mode="CRD", layout="NCHW"),
        space_to_depth(n=16, c=3, h=224, w=224, block=2, layout="NCHW", dtype="float32"),
        strided_slice(x=(32, 224, 224, 16), begin=(0, 16, 16), end=(32, 208, 208), dtype="float16"),
        strided_slice(x=(32, 224, 224, 16), strides=(1, 2, 2), dtype="float16"),
        strided_slice(x=(4096, 4096), begin=(None, -1), end=(None, None), strides=(1, -1), dtype="float32"),
        concat(x=[(16, 56, 56, 256), (16, 56, 56, 128)], axis=3, dtype="float16"),
        concat(x=[(16, 256, 56, 56), (16, 128, 56, 56)], axis=1, dtype="float16"),
        pad(x=(16, 112, 112, 64), axes=(1, 2), before=(1, 1), after=(1, 1), dtype="float16"),
        pad(x=(16, 64, 112, 112), axes=(2, 3), before=(1, 1), after=(1, 1), dtype="float32"),
    ]


def drawn(count: int, seed: int) -> list[Workload]:
    """Transpositions and blocks of pixels of 8 to 64 million bytes."""
    rng, found = np.random.default_rng(seed), []
    while len(found) < count:
        dtype = str(rng.choice(["int8", "float16", "float32"]))
        extents = [int(each) for each in rng.integers(1, 200, 4)]
        if rng.integers(2):
            workload = transpose(x=extents, permutation=[int(axis) for axis in rng.permutation(4)], dtype=dtype)
        else:
            block, (n, c, h, w) = int(rng.integers(2, 5)), extents
            how: Any = dict(mode=str(rng.choice(["DCR", "CRD"])), layout=str(rng.choice(["NCHW", "NHWC"])), dtype=dtype)
            workload = depth_to_space(n=n, c=-(-c // block**2) * block**2, h=h, w=w, block=block, **how)
        if 8 << 20 <= workload.output.nbytes <= 64 << 20:
            found.append(workload)
    return found


def numpy_view(workload: Workload, arrays: Sequence[Any]) -> Any:
    """y as a view of x where NumPy has one, otherwise a function that makes y."""
    (x, *_), p = arrays, workload.params
    if workload.op == "transpose":
        return x.transpose(p["permutation"])
    if workload.op in ("depth_to_space", "space_to_depth"):
        (box,) = workload.definition.movement(p).boxes
        return np.lib.stride_tricks.as_strided(
            x, [f.extent for f in box.factors], [f.x * x.itemsize for f in box.factors], writeable=False
        )
    if workload.op == "strided_slice":
        ends = [end if end >= 0 else None for end in p["end"]]
        return x[tuple(slice(*each) for each in zip(p["begin"], ends, p["strides"]))]
    if workload.op == "concat":
        return lambda out: np.concatenate(arrays, p["axis"], out=out)
    inside = tuple(slice(low, low + extent) for low, extent in zip(p["before"], x.shape))

    def padded(out: Any) -> None:
        out[...] = 0
        out[inside] = x

    return padded


def torch_call(workload: Workload, arrays: Sequence[Any]) -> Callable[[], object] | None:
    """The same in PyTorch, into a tensor that exists, if it is installed and has the operator."""
    try:
        import torch
    except ImportError:
        return None
    x = torch.from_numpy(arrays[0])
    if workload.op == "transpose":
        out = torch.empty(workload.output.shape, dtype=x.dtype)
        return lambda: out.copy_(x.permute(workload.permutation))
    if workload.op == "concat":
        tensors = [torch.from_numpy(array) for array in arrays]
        joined = torch.empty(workload.output.shape, dtype=x.dtype)
        return lambda: torch.cat(tensors, workload.axis, out=joined)
    return None


class Bench:
    """One workload with random bits in memory, and its peers."""

    def __init__(self, workload: Workload, target: Target) -> None:
        rng = np.random.default_rng(0)
        self.workload, self.target, self.template = workload, target, DataMovementCpu()
        self.device = open_device(target)
        bits = f"u{workload.definition.movement(workload.params).element_bytes}"
        self.arrays = {
            arg.name: rng.integers(0, 255, arg.nbytes, np.uint8).view(bits).reshape(arg.shape) for arg in workload.signature
        }
        self.y = np.empty(workload.output.shape, bits)
        self.expected = np.empty(workload.output.shape, bits)
        self.from_numpy()
        self.addresses = {name: array.ctypes.data for name, array in self.arrays.items()} | {"y": self.y.ctypes.data}
        self.half = workload.min_bytes // 2
        self.copies = np.ones(self.half, np.uint8), np.zeros(self.half, np.uint8)
        self.pool = ThreadPoolExecutor(max(target.sms - 1, 1))

    def from_numpy(self) -> None:
        made = numpy_view(self.workload, list(self.arrays.values()))
        if callable(made):
            made(self.expected)
        else:
            np.copyto(self.expected.reshape(made.shape), made)

    def launch(self, config: Config) -> Callable[[], None]:
        """A call of a configuration's kernel. Raises AssertionError if its result is wrong."""
        built = compile_source(self.template.kernel(self.workload, self.target, config), self.target)
        bound = self.device.load(built.artifact).bind(self.addresses, {})
        self.y.fill(0xA5)
        bound.launch()
        np.testing.assert_array_equal(self.y, self.expected, err_msg=f"{self.workload.label} {dict(config)}")
        return bound.launch

    def memcpy(self, threads: int) -> None:
        source, to = self.copies
        piece = -(-self.half // threads)
        pieces = [(first, min(piece, self.half - first)) for first in range(0, self.half, piece)]
        jobs = [
            self.pool.submit(_MEMCPY, to.ctypes.data + first, source.ctypes.data + first, nbytes)
            for first, nbytes in pieces[1:]
        ]
        _MEMCPY(to.ctypes.data, source.ctypes.data, pieces[0][1])
        for job in jobs:
            job.result()

    def measure(self, configs: int, rounds: int, seed: int) -> dict[str, Any]:
        space = self.template.space(self.workload, self.target)
        default = self.template.default(self.workload, self.target, space)
        candidates = dict.fromkeys([default, *space.sample(configs, np.random.default_rng(seed))])
        launches = {config: self.launch(config) for config in candidates}
        first = take_turns(launches, max(rounds // 4, 2))
        leaders = dict.fromkeys([*sorted(first, key=lambda config: first[config])[:3], default])
        calls: dict[Any, Callable[[], object]] = {config: launches[config] for config in leaders}
        calls |= {"one": lambda: self.memcpy(1), "all": lambda: self.memcpy(self.target.sms), "numpy": self.from_numpy}
        torch = torch_call(self.workload, list(self.arrays.values()))
        calls |= {} if torch is None else {"torch": torch}
        seconds = take_turns(calls, rounds)
        best = min(leaders, key=lambda config: seconds[config])
        self.pool.shutdown()
        self.device.close()
        return {
            "label": self.workload.label,
            "nbytes": self.workload.min_bytes,
            "best_us": seconds[best] * 1e6,
            "best_config": dict(best),
            "default_us": seconds[default] * 1e6,
            "memcpy_us": min(seconds["one"], seconds["all"]) * 1e6,
            "numpy_us": seconds["numpy"] * 1e6,
            "torch_us": seconds["torch"] * 1e6 if torch else None,
        }


def take_turns(calls: dict[Any, Callable[[], object]], rounds: int) -> dict[Any, float]:
    """The best seconds of each call."""
    best = dict.fromkeys(calls, math.inf)
    for _ in range(rounds):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - begin)
    return best


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines: list[tuple[object, ...]] = [
        (
            row["label"],
            f"{row['nbytes'] / 1e6:.0f}",
            *(f"{row[name]:.0f}" for name in ("best_us", "default_us", "memcpy_us")),
            f"{row['memcpy_us'] / row['best_us']:.2f}",
            f"{row['numpy_us']:.0f}",
            "" if row["torch_us"] is None else f"{row['torch_us']:.0f}",
        )
        for row in rows
    ]
    shares = [row["memcpy_us"] / row["best_us"] for row in rows]
    lines.append(("geometric mean", "", "", "", "", f"{common.geometric_mean(shares):.2f}", "", ""))
    return common.table(HEADER, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", type=int, default=12, help="random configurations of each workload, beside the default")
    parser.add_argument("--rounds", type=int, default=20, help="launches; the best one counts")
    parser.add_argument("--draws", type=int, default=0, help="further workloads, drawn from the seed")
    parser.add_argument("--only", default="", help="workloads whose label contains this text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="JSON file to write")
    options = parser.parse_args()
    target = detect("cpu")
    rows = []
    for workload in [*chosen(), *drawn(options.draws, options.seed)]:
        if options.only in workload.label:
            rows.append(Bench(workload, target).measure(options.configs, options.rounds, options.seed))
            print(table(rows[-1:]).splitlines()[-2], flush=True)
    common.write(options.out, {"target": target.facts(), "rows": rows})
    print(table(rows))


if __name__ == "__main__":
    main()
