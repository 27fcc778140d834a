"""The roofline: no recorded time is below what we call impossible, and hand-computed bounds."""

from __future__ import annotations

import gzip
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import schedsearch
from schedsearch import Workload
from schedsearch.measurement import COLD_GRAPH, HOT_GRAPH, MODES
from schedsearch.roofline import least_time_ns, suspect_time_ns
from schedsearch.target import PRESETS, Target

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
H200 = "cuda:sm_90:132:NVIDIA H200"
_LABEL = re.compile(
    r"conv2d (\d+)x(\d+)x(\d+)x(\d+) k(\d+) (\d+)x(\d+)(?: s(\d+)(?:x(\d+))?)?(?: p([\d,]+))?(?: d(\d+)(?:x(\d+))?)?"
    r"(?: g(\d+))? (f16|bf16|f32) NHWC((?:\+\w+)*)"
)
_DTYPES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}


def from_label(label: str) -> Workload | None:
    match = _LABEL.fullmatch(label)
    if match is None:
        return None
    n, h, w, c, k, r, s = map(int, match.groups()[:7])
    pairs = {
        name: (int(match[at]), int(match[at + 1] or match[at]))
        for name, at in (("stride", 8), ("dilation", 11))
        if match[at]
    }
    padding = [int(text) for text in match[10].split(",")] if match[10] else [0]
    return schedsearch.conv2d(
        n=n, h=h, w=w, c=c, k=k, r=r, s=s, padding=padding[0] if len(padding) == 1 else padding, groups=int(match[13] or 1),
        dtype=_DTYPES[match[14]], epilogue=tuple(match[15].split("+")[1:]), **pairs,
    )  # fmt: skip


def _read(path: Path) -> Any:
    return json.loads((gzip.open(path) if path.suffix == ".gz" else path.open()).read())


def _times_us(found: Any) -> Iterator[tuple[Workload, float]]:
    """Every time in results that stands beside its workload, whatever the file's form; of cuDNN's times too."""
    if isinstance(found, list):
        for each in found:
            yield from _times_us(each)
    if not isinstance(found, dict):
        return
    described = found.get("workload") or found.get("label")
    if isinstance(described, dict):
        workload = Workload(described["op"], described["params"])
    else:
        workload = from_label(str(described)) if described else None
    if workload is not None:
        yield from ((workload, v) for k, v in found.items() if k == "us" or (k.endswith("_us") and isinstance(v, float)))
        yield from ((workload, ns / 1e3) for _, _, ns in found.get("trials", ()) if ns) if "default_ns" in found else ()
        templates = found["templates"].values() if isinstance(found.get("templates"), dict) else ()
        yield from ((workload, row[-1]) for template in templates for row in template.get("rows", ()) if row[-1])
    for key, value in found.items():
        own = from_label(key)
        if own is not None and isinstance(value, float):
            yield own, value
        elif own is not None and isinstance(value, dict) and "us" in value:
            yield own, value["us"]
        else:
            yield from _times_us(value)


def test_no_recorded_time_is_below_the_bounds() -> None:
    """Of our kernels, and of cuDNN's and PyTorch's beside them: thousands of times on an H200, and some on a CPU."""
    seen, shapes = 0, set()
    for path in sorted((BENCHMARKS / "results").glob("*.json*")):
        data = _read(path)
        target = data.get("target") if isinstance(data, dict) else None
        key = Target(**target).key if isinstance(target, dict) and "kind" in target else H200
        for workload, time_us in _times_us(data):
            # the chain keeps what one layer writes in the cache for the next
            mode = HOT_GRAPH if "chain" in path.name or key.startswith("cpu") else COLD_GRAPH
            assert 1e3 * time_us > suspect_time_ns(workload, key, mode) >= least_time_ns(workload, key, mode), (
                path.name,
                workload.label,
                time_us,
                suspect_time_ns(workload, key, mode),
            )
            seen, shapes = seen + 1, shapes | {workload.id}
    assert seen > 3000 and len(shapes) > 100


def test_no_time_of_the_recorded_spaces_is_below_the_bounds() -> None:
    seen = 0
    for path in sorted((BENCHMARKS / "spaces").glob("*.gz")):
        data = _read(path)
        workload = Workload.from_json(data["problem_size"])
        for row in data["cache"].values():
            if isinstance(row["time"], float):
                assert 1e6 * min(row["times"]) > suspect_time_ns(workload, data["device_name"]) > 0
                seen += 1
    assert seen > 6000


def test_hand_computed_bounds_on_an_h200() -> None:
    """132 SMs x 1.98 GHz: 261.36 clocks per ns; 4096 operations on fp16, and 64 bytes from L2, per clock and SM."""
    # a product of matrices, 4096 x 4096 x 4096, by its definition: 2 x 4096^3 operations
    product = schedsearch.conv2d(n=1, h=64, w=64, c=4096, k=4096, r=1, s=1)
    assert product.flops == 2 * 4096**3
    assert suspect_time_ns(product, H200) == pytest.approx(2 * 4096**3 / (261.36 * 4096))  # 128 us, at 1070 TFLOPS
    assert least_time_ns(product, H200) == pytest.approx(4096**3 / (1.1 * 261.36 * 4096))  # half the work, 10 % more clock
    # fp32 has tf32 at half the rate
    assert suspect_time_ns(product.replace(dtype="float32", out_dtype="float32"), H200) == pytest.approx(
        2 * 4096**3 / (261.36 * 2048)
    )
    # a pointwise layer is bound by memory: 51.38 + 12.85 MB + 32 KB
    layer = schedsearch.conv2d(n=32, h=56, w=56, c=64, k=256, r=1, s=1)
    nbytes = 2 * (32 * 56 * 56 * (64 + 256) + 64 * 256)
    assert suspect_time_ns(layer, H200) == pytest.approx(0.6 * nbytes / 4800)
    assert least_time_ns(layer, H200) == pytest.approx(0.6 * nbytes / (1.25 * 4900))
    # hot operands come from L2
    assert suspect_time_ns(layer, H200, HOT_GRAPH) == pytest.approx(nbytes / (64 * 261.36))
    # nothing is faster than a launch
    tiny = schedsearch.conv2d(n=1, h=8, w=8, c=16, k=16, r=1, s=1)
    assert (least_time_ns(tiny, H200), suspect_time_ns(tiny, H200)) == (300, 700)


def test_taps_that_an_algorithm_may_save_do_not_count() -> None:
    """Winograd's algorithm on large tiles needs little more than one multiplication for each output and channel."""
    layer = schedsearch.conv2d(n=32, h=56, w=56, c=64, k=64, r=3, s=3, padding=1)
    assert layer.work.least_flops == layer.flops // 9
    assert layer.work.least_bytes == layer.min_bytes


@pytest.mark.parametrize(
    "parameters",
    [
        {"h": 7, "w": 9, "r": 3, "s": 3, "padding": 1},
        {"h": 8, "w": 8, "r": 1, "s": 1, "stride": 2},  # three of four pixels are never read
        {"h": 9, "w": 8, "r": 3, "s": 2, "stride": 2, "padding": (1, 0)},
        {"h": 1, "w": 1, "r": 3, "s": 3, "padding": 1},  # only the middle tap meets the image
        {"h": 2, "w": 3, "r": 3, "s": 3, "padding": 9},
        {"h": 12, "w": 13, "r": 3, "s": 3, "stride": (3, 2), "dilation": (2, 3), "padding": (0, 4, 3, 1)},
        {"h": 5, "w": 5, "r": 4, "s": 5, "stride": 4, "padding": (3, 0, 2, 1)},
    ],
    ids=str,
)
def test_least_work_never_exceeds_what_a_count_of_all_taps_finds(parameters: dict[str, Any]) -> None:
    workload = schedsearch.conv2d(n=1, c=1, k=1, **parameters)
    inputs, taps, outputs = set(), set(), set()
    (top, left, _, _), (sy, sx), (dy, dx) = workload.padding, workload.stride, workload.dilation
    _, out_h, out_w, _ = workload.output.shape
    for oh, ow, r, s in itertools.product(range(out_h), range(out_w), range(workload.r), range(workload.s)):
        y, x = oh * sy - top + r * dy, ow * sx - left + s * dx
        if 0 <= y < workload.h and 0 <= x < workload.w:
            inputs.add((y, x))
            taps.add((r, s))
            outputs.add((oh, ow))
    assert 0 < workload.work.least_flops <= 2 * len(outputs)
    counted = 2 * (len(inputs) + len(taps) + out_h * out_w)
    assert 0.5 * counted <= workload.work.least_bytes <= counted


@pytest.mark.parametrize("key", [*(target.key for target in PRESETS.values()), "cpu:512:2:Some CPU"])
@pytest.mark.parametrize("mode", MODES)
def test_what_is_suspect_is_never_less_than_what_is_impossible(key: str, mode: str) -> None:
    for k, size, dtype in itertools.product((8, 512), (1, 7, 112), ("float16", "float32")):
        layer = schedsearch.conv2d(n=2, h=size, w=size, c=64, k=k, r=3, s=3, padding=1, dtype=dtype)
        assert 0 < least_time_ns(layer, key, mode) <= suspect_time_ns(layer, key, mode)


@pytest.mark.parametrize(
    "key", ["", "opencl", "cuda", "cuda:sm_90", "cuda:sm_x:132:H", "cpu:512", "cuda:sm_999:148:X", "\ud800\n"]
)
def test_unknown_devices_have_generous_bounds(key: str) -> None:
    layer = schedsearch.conv2d(n=32, h=56, w=56, c=64, k=64, r=3, s=3, padding=1)
    assert 0 < least_time_ns(layer, key) < least_time_ns(layer, H200)


def test_a_workload_of_another_tuner_is_bound_by_the_launch_alone() -> None:
    foreign = Workload("foreign", {"tuner": "kernel-tuner", "kernel": "gemm"})
    assert least_time_ns(foreign, H200) == suspect_time_ns(foreign, H200) == 300


def test_it_needs_no_numpy() -> None:
    code = "import sys, schedsearch.roofline; print([name for name in ('numpy', 'numba', 'cuda') if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
