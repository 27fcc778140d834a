"""conv2d_mma and matmul_mma with operands loaded by TMA: emulated, compiled for cards that have TMA, and run on a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from typing import Any

import integer_model
import numpy as np
import pytest
from cluster_emulator import ClusterEmulator
from conv2d_numpy import expected, integers, run_on_gpu, to_bits
from long_cases import except_long
from mma_emulated import emulate

from schedsearch import batch_matmul, dense
from schedsearch.backend import compile_source
from schedsearch.config import Config
from schedsearch.device import open_device
from schedsearch.device.detect import detect
from schedsearch.target import PRESETS
from schedsearch.template import load_template
from schedsearch.templates.conv2d.mma import Conv2dMma
from schedsearch.testing.emulator import Memory
from schedsearch.verification.verify import verify_once
from schedsearch.workload import Workload

TEMPLATE, H200 = Conv2dMma(), PRESETS["h200"]
SMALL = dict(
    bm=32, bn=32, bk=32, wm=16, wn=32, slices=1, stages=3, band=1, persistent=False, blocks_per_sm=1, loads="tma"
)  # fmt: skip
NARROW = {**SMALL, "bn": 16, "wn": 16}
TAPS: dict[str, Any] = dict(n=2, h=7, w=6, c=24, k=40, r=3, s=2, padding=(1, 0, 2, 1), stride=(2, 1))
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "padding": (dict(n=1, h=6, w=5, c=32, k=24, r=3, s=3, padding=1), SMALL),
    "the last step of a tap has zeros, fewer stages than steps": (TAPS, {**NARROW, "bk": 16, "stages": 2}),
    "dilation, float32 out": ({**TAPS, "dilation": (1, 2), "w": 9, "out_dtype": "float32"}, {**SMALL, "bk": 16}),
    "more tiles than blocks, two slices, more stages than steps": (
        dict(n=3, h=8, w=7, c=48, k=40, r=1, s=1), {**SMALL, "bm": 16, "persistent": True, "bk": 64, "slices": 2},
    ),
    "groups, two rows of warps": (
        dict(n=1, h=8, w=7, c=64, k=48, r=3, s=3, padding=1, groups=2), {**SMALL, "bm": 64, "wm": 32, "stages": 4},
    ),
}  # fmt: skip
OF_INTEGERS: dict[str, Any] = dict(n=2, h=5, w=4, c=32, k=36, r=3, s=2, padding=1, dtype="int8")
INTEGER_CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "requantised, both zero points": (
        {**OF_INTEGERS, "zero_points": ["x", "weight"], "epilogue": ["bias", {"requantise": {"to": "int8"}}]},
        {**SMALL, "batch": "folded"},
    ),
    "uint8 x int8, bound batch, more tiles than blocks": (
        {**OF_INTEGERS, "n": 3, "dtype": "uint8", "weight_dtype": "int8"},
        {**NARROW, "batch": "bound", "persistent": True, "bm": 16},
    ),
    "groups": ({**OF_INTEGERS, "n": 1, "c": 64, "groups": 2}, {**NARROW, "merged": 1}),
}  # fmt: skip


def emulated(monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any], config: dict[str, Any], **how: Any) -> tuple[Any, ...]:
    """y of one configuration, in `to_bits` form, with the workload and the arrays that it was computed from."""
    workload = Workload.conv2d(**shape)
    arrays = integers(workload, np.random.default_rng(0))
    stored = {name: array.astype(np.float16) for name, array in arrays.items()}
    return workload, arrays, to_bits(emulate(monkeypatch, workload, config, stored, **how), workload.out_dtype)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.mostly_long(3)
def test_tiles_are_loaded_by_tma(monkeypatch: pytest.MonkeyPatch, case: str, late: bool) -> None:
    shape, config = CASES[case]
    few_blocks = dataclasses.replace(H200, sms=2)
    assert TEMPLATE.space(Workload.conv2d(**shape), few_blocks).check(Config(config)) == []
    workload, arrays, y = emulated(monkeypatch, shape, config, late=late)
    expected(workload, arrays).check(y)


@pytest.mark.parametrize("case", INTEGER_CASES)
def test_sums_of_integers_are_exact(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    shape, config = INTEGER_CASES[case]
    workload = Workload.conv2d(**shape)
    assert set(config) == set(TEMPLATE.space(workload, H200).names)
    arrays = integer_model.arguments(workload)
    y = emulate(monkeypatch, workload, config, arrays, late=True)
    np.testing.assert_array_equal(y, integer_model.expected(workload, arrays))


def test_products_with_weights_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles past the end of a matrix, and of its columns."""
    workload, template = batch_matmul(b=3, m=19, n=21, k=48, dtype="int8", epilogue=["bias"]), load_template("matmul_mma")
    rng = np.random.default_rng(0)
    arrays = {spec.name: rng.integers(-8, 9, spec.shape).astype(spec.dtype) for spec in workload.signature}
    y = emulate(monkeypatch, workload, {**NARROW, "bm": 16}, arrays, by=template, late=True)
    right = np.einsum("bmk,bnk->bmn", arrays["x"].astype(np.int64), arrays["weight"]) + arrays["bias"]
    np.testing.assert_array_equal(y, right)


class Hasty(ClusterEmulator):
    """The loading thread does not wait until a stage has been read."""

    def mbarrier_wait(self, shared: int, parity: int) -> None:
        if self.thread.number < self.block.size - 32:
            super().mbarrier_wait(shared, parity)


class Unready(ClusterEmulator):
    """Warps multiply without waiting for the operands."""

    def mbarrier_wait(self, shared: int, parity: int) -> None:
        if self.thread.number >= self.block.size - 32:
            super().mbarrier_wait(shared, parity)


@pytest.mark.parametrize("careless", [Hasty, Unready])
def test_a_wait_that_is_missing_shows(monkeypatch: pytest.MonkeyPatch, careless: type[ClusterEmulator]) -> None:
    emulator = careless(Memory(), lambda value, *_: value, True)
    with pytest.raises(AssertionError):  # a barrier's count, or the numbers
        workload, arrays, y = emulated(monkeypatch, TAPS, {**NARROW, "bk": 16, "stages": 2}, emulator=emulator)
        expected(workload, arrays).check(y)


# --- Spaces ----------------------------------------------------------------------------------------------------------


def loads_of(card: str = "h200", **shape: Any) -> tuple[Any, ...]:
    workload = Workload.conv2d(**{**dict(n=4, h=8, w=8, c=64, k=64, r=3, s=3), **shape})
    return tuple(TEMPLATE.space(workload, PRESETS[card]).values["loads"])


def test_only_cards_and_shapes_that_tma_takes_have_the_choice() -> None:
    assert {card for card in PRESETS if "tma" in loads_of(card)} == {"h100", "h200", "b200", "gb300", "rtx5090"}
    assert loads_of(c=20) == loads_of(stride=9) == loads_of(padding=129) == loads_of(weight_layout="OIHW") == ("copies",)
    assert loads_of(layout="NCHW") == loads_of(groups=16) == ("copies",)


def test_channels_that_follow_those_of_a_group_are_never_loaded() -> None:
    """They would be multiplied by zeros, and infinities by zeros are NaN."""
    space = TEMPLATE.space(Workload.conv2d(n=4, h=8, w=8, c=96, k=96, r=3, s=3, groups=2), H200).restrict({"loads": ["tma"]})
    assert {config["bk"] for config in space.sample(64, np.random.default_rng(0))} == {16}


def test_configurations_that_were_recorded_without_the_knob_copy() -> None:
    recorded = {name: value for name, value in SMALL.items() if name != "loads"}
    assert TEMPLATE.current(recorded) == {**recorded, "loads": "copies"}
    assert load_template("matmul_mma").current({**recorded, "loads": "tma"})["loads"] == "tma"


# --- Compiling -------------------------------------------------------------------------------------------------------
LAYER: dict[str, Any] = dict(n=32, h=28, w=28, c=128, k=128, r=3, s=3, padding=1, epilogue=("bias", "relu"))
FAST = dict(
    bm=128, bn=64, bk=64, wm=64, wn=32, slices=1, stages=3, band=1, persistent=False, blocks_per_sm=1, loads="tma"
)  # fmt: skip


@pytest.mark.parametrize("card", except_long(["h200", "b200", "rtx5090"], long=["b200", "rtx5090"]))
@pytest.mark.mostly_long(3)
def test_a_kernel_has_tensor_copies_only(card: str) -> None:
    pytest.importorskip("numba_cuda", reason="needs numba-cuda: install the extra cu12 or cu13")
    from schedsearch.backend.cuda import ptx_of

    workload, target = Workload.conv2d(**LAYER), PRESETS[card]
    source = TEMPLATE.kernel(workload, target, Config(FAST))
    text = "\n".join(ptx_of(source, target))
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.4d\S*im2col", text)) == 1
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.3d", text)) == 1 + FAST["stages"]  # in the loop, and ahead of it
    assert "ldmatrix" in text and "cp.async.c" not in text and "wgmma" not in text
    found = compile_source(source, target).resources
    assert found.spill_bytes == 0 and found.registers * 160 <= target.registers_per_sm


@pytest.mark.parametrize(
    "config",
    [FAST, {**FAST, "persistent": True, "blocks_per_sm": 2}, {**FAST, "wn": 16, "slices": 2}],
    ids=["", "tiles", "slices"],
)
def test_a_buffer_is_released_behind_a_fence_of_proxies(config: dict[str, Any]) -> None:
    """TMA writes in the asynchronous proxy. By the PTX ISA ("Async proxy") ldmatrix reads before it writes only behind
    a fence; without one, sums on an H200 were wrong in some of a thousand launches."""
    pytest.importorskip("numba_cuda", reason="needs numba-cuda: install the extra cu12 or cu13")
    from schedsearch.backend.cuda import ptx_of

    text = "\n".join(ptx_of(TEMPLATE.kernel(Workload.conv2d(**LAYER), H200, Config(config)), H200))
    found = re.findall(r"ldmatrix|fence\.proxy\.async|mbarrier\.arrive(?!\.expect)", text)
    releases = [place for place, each in enumerate(found) if each.startswith("mbarrier")]
    assert releases and all(found[place - 1].startswith("fence") for place in releases)


# --- On the device ---------------------------------------------------------------------------------------------------


def random_workload(rng: np.random.Generator) -> Workload:
    """A convolution whose steps are the same for both ways to load: bk = 32 divides the channels of a group."""
    groups, r, s = int(rng.choice([1, 1, 2])), int(rng.integers(1, 4)), int(rng.integers(1, 4))
    return Workload.conv2d(
        n=int(rng.integers(1, 5)), h=int(rng.integers(5, 30)), w=int(rng.integers(5, 30)),
        c=groups * 32 * int(rng.integers(1, 4)), k=groups * int(rng.integers(2, 90)), r=r, s=s,
        stride=(int(rng.integers(1, 3)), int(rng.integers(1, 3))), padding=int(rng.integers(0, 3)),
        dilation=(1, int(rng.integers(1, 3))), groups=groups, dtype=str(rng.choice(["float16", "bfloat16"])),
        epilogue=("bias", "relu") if rng.random() < 0.5 else (),
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(6))
def test_both_ways_to_load_give_the_same_bits(seed: int) -> None:
    target, rng = detect("cuda"), np.random.default_rng(seed)
    if target.older_than((9, 0)):
        pytest.skip("the card has no TMA")
    workload = random_workload(rng)
    arrays = {spec.name: rng.standard_normal(spec.shape).astype(np.float32) for spec in workload.signature}
    space = TEMPLATE.space(workload, target).restrict({"loads": ["tma"], "bk": [32]})
    for config in space.sample(3, rng):
        both = [
            run_on_gpu(TEMPLATE, workload, target, Config({**config, "loads": loads}), arrays) for loads in ("copies", "tma")
        ]
        np.testing.assert_array_equal(*both, err_msg=f"{workload.label} {config}")


FLOATS: dict[str, Workload] = {
    "E4M3": dense(m=200, n=136, k=96, dtype="float8_e4m3"),
    "E4M3 x E5M2, scaled": dense(
        m=70, n=72, k=160, dtype="float8_e4m3", weight_dtype="float8_e5m2", epilogue=[{"dequantise": {"to": "bfloat16"}}]
    ),
    "E5M2, weights of their own": batch_matmul(b=3, m=45, n=40, k=64, dtype="float8_e5m2", out_dtype="float32"),
    "TF32": dense(m=130, n=96, k=100, dtype="float32", precision="tf32", epilogue=["bias"]),
    "three products": dense(m=130, n=96, k=100, dtype="float32", precision="fp32"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("loads", ["copies", "tma"])
@pytest.mark.parametrize("form", FLOATS)
def test_verification_accepts_products_of_floats(form: str, loads: str) -> None:
    workload, target, template = FLOATS[form], detect("cuda"), load_template("matmul_mma")
    if target.older_than((9, 0)):
        pytest.skip("the card has no TMA")
    space = template.space(workload, target).restrict({"loads": [loads]})
    with contextlib.closing(open_device(target)) as device:
        for config in space.sample(2, np.random.default_rng(0)):
            kernel = device.load(compile_source(template.kernel(workload, target, config), target).artifact)
            assert verify_once(device, workload, kernel) is None, config
            kernel.close()


@pytest.mark.gpu
@pytest.mark.parametrize("form", INTEGER_CASES)
def test_integers_are_exact_on_the_device(form: str) -> None:
    target = detect("cuda")
    if target.older_than((9, 0)):
        pytest.skip("the card has no TMA")
    workload = Workload.conv2d(**{**INTEGER_CASES[form][0], "h": 23, "w": 19})
    check = integer_model.exactly(TEMPLATE, workload, target)
    for config in TEMPLATE.space(workload, target).restrict({"loads": ["tma"]}).sample(3, np.random.default_rng(1)):
        check(config)


@pytest.mark.gpu
@pytest.mark.parametrize("slices", [2, 4])
def test_no_operand_is_overwritten_before_it_is_read(slices: int) -> None:
    """Blocks that share a multiprocessor and store one tile while they multiply the next delayed ldmatrix the most."""
    target, rng = detect("cuda"), np.random.default_rng(slices)
    if target.older_than((9, 0)):
        pytest.skip("the card has no TMA")
    workload, template = dense(m=2112, n=1024, k=2048), load_template("matmul_mma")
    config = Config(
        {**SMALL, "bm": 64, "bn": 16, "bk": 64, "wn": 16, "persistent": True, "blocks_per_sm": 2, "slices": slices}
    )
    x, w = (rng.integers(-1, 2, (rows, 2048)).astype(np.float16) for rows in (2112, 1024))
    exact = (x.astype(np.float32) @ w.astype(np.float32).T).astype(np.float16)
    y, wrong = np.empty_like(exact), 0
    with contextlib.closing(open_device(target)) as device:
        kernel = device.load(compile_source(template.kernel(workload, target, config), target).artifact)
        addresses = {name: device.allocate(array.nbytes) for name, array in (("x", x), ("weight", w), ("y", y))}
        for name, array in (("x", x), ("weight", w)):
            device.copy_in(addresses[name], memoryview(array).cast("B"))
        bound = kernel.bind(addresses, {})
        for _ in range(300):
            bound.launch()
            device.synchronize()
            device.copy_out(memoryview(y).cast("B"), addresses["y"])
            wrong += not np.array_equal(y, exact)
        kernel.close()
        for address in addresses.values():
            device.free(address)
    assert wrong == 0
