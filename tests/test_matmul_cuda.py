"""dense and batch_matmul on a GPU: every recorded case and every layout, by every template that takes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster_emulator import ClusterEmulator
from conv2d_support import run_on_cpu
from matmul_support import CASES, arguments, cases, expected, scalars
from mma_emulated import emulate
from ptx_emulator import PtxEmulator
from test_conv2d_wgmma_zero_points import run_ptx

from schedsearch import batch_matmul, dense
from schedsearch.config import Config
from schedsearch.device.detect import detect
from schedsearch.target import PRESETS
from schedsearch.template import load_template, load_templates
from schedsearch.templates.conv2d import wgmma as conv2d_wgmma
from schedsearch.templates.conv2d import wgmma_loads, wgmma_store
from schedsearch.templates.matmul import gemv
from schedsearch.templates.parts import (
    addressing,
    epilogue,
    epilogue_fragments,
    gather,
    pipeline,
    row_products,
    sharing,
    simt,
    store,
    store_words,
    walk,
    wgmma,
    window_sums,
)
from schedsearch.testing.emulator import Memory
from schedsearch.workload import Workload

H200 = PRESETS["h200"]
NAMES = tuple(name for name in load_templates() if name.startswith("matmul_") and load_template(name).kind == "cuda")
# Sizes that divide nothing, both layouts of every factor, and every kind of epilogue.
FORMS: list[dict[str, Any]] = [
    {"m": 1, "n": 1000, "k": 2048, "epilogue": ["bias"]},
    {"m": 3, "n": 70, "k": 136, "weight_layout": "KN", "epilogue": ["bias", "relu"]},
    {"m": 37, "n": 41, "k": 29, "weight_layout": "KN", "epilogue": ["residual", "leaky_relu", "scale_shift", "clip"]},
    {"m": 200, "n": 264, "k": 520, "dtype": "bfloat16", "epilogue": ["bias", "residual", "relu"]},
    {"m": 65, "n": 48, "k": 64, "dtype": "float32", "precision": "tf32"},
    {"m": 5, "n": 33, "k": 17, "dtype": "float32", "weight_layout": "KN", "epilogue": ["bias"]},
    {"m": 130, "n": 96, "k": 160, "dtype": "int8", "epilogue": ["bias", "relu", "requantise"]},
    {"m": 2, "n": 96, "k": 160, "dtype": "uint8", "weight_dtype": "int8", "zero_points": ["x"], "epilogue": ["requantise"]},
    {"m": 9, "n": 21, "k": 30, "dtype": "uint8", "zero_points": ["x", "weight"], "weight_layout": "KN"},
    {"b": 4, "m": 6, "n": 24, "k": 40, "weight_batch": 1, "x_layout": "KM", "epilogue": ["residual", "bias"]},
    {"b": 3, "m": 70, "n": 72, "k": 104, "epilogue": ["bias", "residual", "relu"]},
    {"b": 3, "m": 10, "n": 32, "k": 48, "x_batch": 1, "x_layout": "KM", "weight_layout": "KN"},
    {"b": 3, "m": 20, "n": 48, "k": 64, "dtype": "int8", "x_batch": 1, "epilogue": ["requantise"]},
    {"b": 2, "m": 9, "n": 13, "k": 7, "dtype": "uint8", "zero_points": ["x"], "weight_layout": "KN"},
    {"b": 5, "m": 2, "n": 33, "k": 64, "x_batch": 1, "epilogue": ["bias"]},
    {"m": 70, "n": 96, "k": 160, "dtype": "uint8", "weight_dtype": "int8", "zero_points": ["x", "weight"],
     "epilogue": ["requantise"]},
    {"b": 3, "m": 70, "n": 48, "k": 64, "dtype": "int8", "zero_points": ["weight"], "x_layout": "KM", "weight_layout": "KN"},
]  # fmt: skip


def workload_of(params: dict[str, Any]) -> Workload:
    return batch_matmul(**params) if "b" in params else dense(**params)


def takers(workload: Workload) -> list[str]:
    return [name for name in NAMES if load_template(name).validate(workload, H200) is None]


def test_every_form_has_a_template() -> None:
    assert [workload_of(form).label for form in FORMS if not takers(workload_of(form))] == []


def test_weights_in_the_other_layout_are_transposed_once_if_they_are_constant() -> None:
    template = load_template("matmul_mma")
    sizes: dict[str, Any] = {"m": 64, "n": 64, "k": 64, "weight_layout": "KN"}
    for workload, constant in ((dense(**sizes), True), (batch_matmul(b=2, weight_batch=1, **sizes), False)):
        config = template.default(workload, H200, template.space(workload, H200))
        assert [step.constant for step in template.kernel(workload, H200, config).steps] == [constant, False]


SMALL = dict(bm=16, bn=16, bk=32, wm=16, wn=16, slices=1, stages=2, band=1, persistent=False, blocks_per_sm=1)


def test_a_dense_layer_in_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = dense(m=21, n=19, k=36, dtype="int8", epilogue=["bias"])
    arrays = arguments(workload)
    template = load_template("matmul_mma")
    config = Config({**SMALL, **{name: 1 for name in ("merged",) if name in template.space(workload, H200).names}})
    y = emulate(monkeypatch, workload, config, arrays, by=template)
    np.testing.assert_array_equal(y, expected(workload, arrays))


def test_a_batch_with_weights_of_its_own_in_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """mma: tiles past the end of a matrix, and of its columns."""
    workload = batch_matmul(b=3, m=19, n=21, k=36, dtype="int8", epilogue=["bias", "residual"])
    arrays = arguments(workload)
    y = emulate(monkeypatch, workload, SMALL, arrays, by=load_template("matmul_mma"))
    np.testing.assert_array_equal(y, expected(workload, arrays))


WGMMA = (  # the kernel's modules
    conv2d_wgmma, wgmma_loads, wgmma_store, gather, pipeline, sharing, store, store_words, walk, wgmma,
)  # fmt: skip
WGMMA_TILES = dict(
    bn=32, bk=64, stages=2, split_k=1, cluster_m=1, cluster_n=1, persistent=False, blocks_per_sm=1, schedule="together",
    band=2, l2_promotion=256,
)  # fmt: skip


@pytest.mark.parametrize("warpgroups", [1, 2])
def test_a_batch_in_the_emulator_of_clusters(monkeypatch: pytest.MonkeyPatch, warpgroups: int) -> None:
    """wgmma: a persistent block walks tiles of several matrices, which m and n do not fill."""
    workload = batch_matmul(b=3, m=70, n=40, k=72)
    arrays, y = arguments(workload), np.full(workload.output.shape, np.nan, np.float16)
    emulator = ClusterEmulator(Memory(), lambda value, *_: value, late=True)
    emulator.stand_in(monkeypatch, *WGMMA, epilogue_fragments)
    config = Config({**WGMMA_TILES, "warpgroups": warpgroups})
    (step,) = load_template("matmul_wgmma").kernel(workload, H200, config).steps
    images = {"x": arrays["x"].reshape(3, 1, 70, 72), "weight": arrays["weight"].reshape(120, 1, 72)}
    emulator.run(step, {}, 2, {**images, "y": y.reshape(3, 1, 70, 40)})
    np.testing.assert_array_equal(y, expected(workload, arrays))


def test_a_batch_with_a_zero_point_of_its_weights_in_the_emulator_of_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    """wgmma: tiles of one matrix, whose rows have sums of x of their own."""
    workload = batch_matmul(b=3, m=70, n=40, k=64, dtype="int8", zero_points=["weight"])
    arrays, y, memory = arguments(workload), np.full(workload.output.shape, 99, np.int32), Memory()
    emulator = ClusterEmulator(memory, lambda value, *_: value, late=True)
    emulator.stand_in(monkeypatch, *WGMMA, addressing, window_sums)
    run_ptx(monkeypatch, memory)
    source = load_template("matmul_wgmma").kernel(workload, H200, Config({**WGMMA_TILES, "warpgroups": 1}))
    sums = np.full(source.workspaces["x_window_sums"], 0x55, np.uint8)
    buffers = {name: memory.add(array) for name, array in {**arrays, "x_window_sums": sums, "y": y}.items()}
    images = {"x": arrays["x"].reshape(3, 1, 70, 64), "weight": arrays["weight"].reshape(120, 1, 64)}
    for step in source.steps:
        emulator.run(step, buffers, 2, {**images, "y": y.reshape(3, 70, 40)}, scalars(workload))
    np.testing.assert_array_equal(y, expected(workload, arrays))


VECTORS: list[tuple[dict[str, Any], dict[str, int]]] = [
    ({"m": 2, "n": 7, "k": 1040}, {"columns": 2, "slices": 2, "groups": 2, "unroll": 2}),
    ({"m": 1, "n": 5, "k": 264, "dtype": "float32", "epilogue": ["bias", "relu"]},
     {"columns": 4, "slices": 1, "groups": 1, "unroll": 1}),
    ({"m": 3, "n": 5, "k": 1552, "dtype": "uint8", "weight_dtype": "int8", "zero_points": ["x", "weight"]},
     {"columns": 2, "slices": 2, "groups": 1, "unroll": 2}),
    ({"b": 2, "m": 2, "n": 6, "k": 64, "x_batch": 1, "epilogue": ["residual"]},
     {"columns": 1, "slices": 1, "groups": 2, "unroll": 1}),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(VECTORS)))
def test_few_rows_in_the_emulator(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Thread by thread, the PTX too: k that fills no step, columns that fill no block, zero points, a shared x."""
    workload, config = workload_of(VECTORS[number][0]), Config(VECTORS[number][1])
    arrays, y = arguments(workload), np.full(workload.output.shape, 99, np.dtype(workload.output.dtype))
    truth = expected(workload, arrays)
    cached = (epilogue._operation, simt.store_global, simt.load_shared)
    emulator = PtxEmulator(Memory())
    for each in cached:
        each.cache_clear()
    emulator.stand_in(monkeypatch, gemv, row_products, simt, epilogue)
    source = load_template("matmul_gemv").kernel(workload, H200, config)
    for each in cached:
        each.cache_clear()
    buffers = {name: emulator.memory.add(array) for name, array in {**arrays, "y": y}.items()}
    for step in source.steps:
        emulator.run(step, buffers, 2, scalars=scalars(workload))
    np.testing.assert_array_equal(y, truth)


# --- On a GPU -----------------------------------------------------------------------------------------------------------
def check_on_gpu(workload: Workload, some_of: Callable[..., Any], number: int, sampled: bool = False) -> None:
    """The default of some templates, or a random configuration, gives NumPy's result in every bit."""
    from schedsearch.device import open_device

    target = detect("cuda")
    arrays = arguments(workload)
    truth = expected(workload, arrays)
    device = open_device(target)
    try:
        for template in some_of(load_templates(NAMES).matching(workload, target), number):
            space = template.space(workload, target)
            config = template.default(workload, target, space)
            if sampled:
                config = space.sample(1, np.random.default_rng(number))[0]
            source = template.kernel(workload, target, config)
            outputs = {"y": (truth.shape, truth.dtype)}
            y = run_on_cpu(device, source, arrays, outputs, scalars(workload))["y"]
            np.testing.assert_array_equal(y, truth, err_msg=f"{template.name}: {workload.label} {config}")
    finally:
        device.close()


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(len(FORMS)))
def test_forms_are_exact(some_of: Callable[..., Any], number: int) -> None:
    check_on_gpu(workload_of(FORMS[number]), some_of, number, sampled=number % 2 == 1)


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "number"), [(name, number) for name, count in CASES.items() for number in range(count)])
def test_recorded_cases_are_exact(shared: Path, some_of: Callable[..., Any], family: str, number: int) -> None:
    check_on_gpu(cases(shared, [family])[number], some_of, number)
