"""squeeze_excite: the operator, its reference against PyTorch's layers, and the kernel, emulated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bandwidth_support import H200, stored
from cluster_emulator import ClusterEmulator
from vector_emulator import VectorEmulator

from schedsearch import Workload, squeeze_excite
from schedsearch.backend import compile_source
from schedsearch.config import Config
from schedsearch.ops.dtypes import decode, dtype, encode
from schedsearch.ops.squeeze_excite import SQUEEZE_EXCITE
from schedsearch.template import load_template
from schedsearch.templates.parts import groups, vectors
from schedsearch.templates.squeeze_excite import cuda_kernel
from schedsearch.templates.squeeze_excite.reference import SqueezeExciteReference
from schedsearch.testing.emulator import Memory
from schedsearch.testing.op_contract import OpContract
from schedsearch.testing.template_contract import TemplateContract
from schedsearch.verification.verify import verify_once

CUDA = load_template("squeeze_excite_cuda")
SMALL: dict[str, Any] = {"n": 2, "c": 24, "h": 3, "w": 5, "squeezed": 7}
Array = np.ndarray[Any, Any]


class TestSqueezeExcite(OpContract):
    op = SQUEEZE_EXCITE
    examples = (
        SMALL,
        SMALL | {"activation": "silu", "dtype": "bfloat16"},
        SMALL | {"activation": "hard_swish", "gate": "hard_sigmoid", "alpha": 0.25, "beta": 0.5},
        SMALL | {"layout": "NCHW", "dtype": "float32"},
    )
    wrong = (
        (SMALL | {"squeezed": 0}, "squeezed"),
        (SMALL | {"activation": "gelu"}, "activation"),
        (SMALL | {"gate": "tanh"}, "gate"),
        (SMALL | {"alpha": "one"}, "alpha"),
        (SMALL | {"dtype": "int8"}, "dtype"),
        (SMALL | {"layout": "NCHW32c"}, "layout"),
    )

    def test_the_numbers_of_another_gate_do_not_matter(self) -> None:
        assert squeeze_excite(**SMALL, alpha=2.0).id == squeeze_excite(**SMALL).id


class TestTemplate(TemplateContract):
    """Its spaces, and some kernels, which are compiled."""

    template, target, compiled = CUDA, H200, 1
    accepted = tuple(
        squeeze_excite(**each)
        for each in (
            SMALL,
            {"n": 1, "c": 960, "h": 7, "w": 7, "squeezed": 240, "gate": "hard_sigmoid"},
            {"n": 1, "c": 32, "h": 112, "w": 112, "squeezed": 8, "activation": "silu"},
            {"n": 40, "c": 99, "h": 14, "w": 14, "squeezed": 26, "dtype": "float32"},
        )
    )
    refused = (
        (squeeze_excite(**SMALL, layout="NCHW"), "NHWC"),
        (squeeze_excite(n=1, c=200_000, h=1, w=1, squeezed=8), "shared memory"),
    )


def example(workload: Workload, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    found = {}
    for spec in workload.signature:
        numbers = rng.standard_normal(spec.shape) + (1 if spec.name == "x" else 0)
        if spec.role == "factor":
            numbers /= (workload.c if spec.name == "reduce" else workload.squeezed) ** 0.5
        found[spec.name] = decode(encode(numbers, spec.dtype), spec.dtype)
    return found


def truth(workload: Workload, arrays: dict[str, Array]) -> Array:
    return np.asarray(SqueezeExciteReference().compute(workload, arrays)["y"])


@pytest.mark.parametrize("activation", ["relu", "silu", "hard_swish"])
@pytest.mark.parametrize("gate", ["sigmoid", "hard_sigmoid"])
def test_the_reference_is_what_pytorch_computes(activation: str, gate: str) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    functional = torch.nn.functional
    workload = squeeze_excite(**SMALL, activation=activation, gate=gate, layout="NCHW")
    arrays = example(workload)
    given = [torch.tensor(arrays[spec.name].astype(np.float64)) for spec in workload.signature]
    x, reduce, reduce_bias, expand, expand_bias = given
    hidden = functional.conv2d(functional.adaptive_avg_pool2d(x, 1), reduce[..., None, None], reduce_bias)
    hidden = {"relu": functional.relu, "silu": functional.silu, "hard_swish": functional.hardswish}[activation](hidden)
    sums = functional.conv2d(hidden, expand.T[..., None, None], expand_bias)
    gates = {"sigmoid": torch.sigmoid, "hard_sigmoid": functional.hardsigmoid}[gate](sums)
    np.testing.assert_allclose(truth(workload, arrays), (x * gates).numpy(), rtol=1e-12)
    rows = squeeze_excite(**SMALL, activation=activation, gate=gate)
    found = truth(rows, arrays | {"x": arrays["x"].transpose(0, 2, 3, 1)})
    np.testing.assert_allclose(found.transpose(0, 3, 1, 2), (x * gates).numpy(), rtol=1e-12)


class PeerEmulator(VectorEmulator):
    """Emulates numbers that blocks of a cluster write to one another's shared memory."""

    cluster_arrive: Any = ClusterEmulator.cluster_arrive
    cluster_wait: Any = ClusterEmulator.cluster_wait
    map_shared: Any = ClusterEmulator.map_shared

    def cluster_sync(self) -> None:
        self.cluster_arrive()
        self.cluster_wait()

    def store_at_peer(self, address: int, value: Any) -> None:
        rank, shared = divmod(int(address), self.map_shared(0, 0))
        cluster = self.block.cluster
        peer = cluster.blocks[rank - 1]
        assert cluster.phase > 0, "a block that may not have begun is written to"
        assert peer.running, "a block that has left is written to"
        peer.shared[shared : shared + 4].view(np.float32)[0] = value


def emulated(monkeypatch: pytest.MonkeyPatch, workload: Workload, arrays: dict[str, Array], config: Config) -> Array:
    memory = Memory()
    emulator = PeerEmulator(memory)
    emulator.late_copies = True
    emulator.stand_in(monkeypatch, vectors, groups, cuda_kernel)
    assert CUDA.space(workload, H200).check(config) == []
    (step,) = CUDA.kernel(workload, H200, config).steps
    y = np.zeros(workload.output.shape, dtype(workload.dtype).storage)
    buffers = {name: memory.add(array) for name, array in stored(workload, arrays).items()} | {"y": memory.add(y)}
    emulator.run(step, buffers, sms=2)
    return decode(y, workload.dtype)


CASES = [  # parameters, knobs
    (SMALL | {"gate": "hard_sigmoid"}, dict(cluster=2, channel_parts=2, holds=True, brings=True)),
    (SMALL | {"activation": "silu", "dtype": "bfloat16"}, dict(cluster=4, channel_parts=1, holds=True, brings=True)),
    (SMALL | {"n": 1, "c": 36, "dtype": "float32"}, dict(cluster=8, channel_parts=4, holds=False, brings=False)),
    (SMALL | {"activation": "hard_swish", "c": 9, "w": 1}, dict(cluster=1, channel_parts=1, holds=True, brings=False)),
    (SMALL | {"n": 1, "h": 1, "w": 9, "c": 40}, dict(cluster=4, channel_parts=2, holds=False, brings=True)),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: squeeze_excite(**case[0]).label)
def test_an_emulated_kernel_is_the_definition(monkeypatch: pytest.MonkeyPatch, case: Any) -> None:
    """Also that no thread reads more than the weights before it has waited for the kernel in front."""
    workload = squeeze_excite(**case[0])
    arrays = example(workload)
    found = emulated(monkeypatch, workload, arrays, Config(threads=128, **case[1]))
    tolerance = {"float32": 1e-6, "float16": 6e-4, "bfloat16": 5e-3}[workload.dtype]
    np.testing.assert_allclose(found, truth(workload, arrays), rtol=tolerance, atol=tolerance)


def test_weights_that_are_copied_are_read_before_the_kernel_in_front_ends() -> None:
    workload = squeeze_excite(n=1, c=64, h=7, w=7, squeezed=16)
    config = Config(cluster=4, channel_parts=4, threads=128, holds=True, brings=True)
    (step,) = CUDA.kernel(workload, H200, config).steps
    assert step.ahead == ("reduce_bias", "expand_bias", "reduce", "expand") and step.cluster == 4


def test_few_channels_are_not_shared_but_pixels() -> None:
    few, many = (squeeze_excite(n=1, c=c, h=56, w=56, squeezed=8) for c in (16, 512))
    parts = [CUDA.default(each, H200, CUDA.space(each, H200))["channel_parts"] for each in (few, many)]
    assert parts == [1, 8]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        *(case for case, _ in CASES),
        {"n": 1, "c": 960, "h": 7, "w": 7, "squeezed": 240, "gate": "hard_sigmoid"},
        {"n": 1, "c": 672, "h": 14, "w": 14, "squeezed": 28, "activation": "silu"},
        {"n": 32, "c": 32, "h": 112, "w": 112, "squeezed": 8, "activation": "silu"},
    ],
    ids=lambda case: squeeze_excite(**case).label,
)
def test_kernels_on_the_device(gpu: Any, case: dict[str, Any]) -> None:
    workload = squeeze_excite(**case)
    space = CUDA.space(workload, gpu.target)
    for config in (CUDA.default(workload, gpu.target, space), *space.sample(3, np.random.default_rng(0))):
        kernel = gpu.load(compile_source(CUDA.kernel(workload, gpu.target, config), gpu.target).artifact)
        try:
            assert verify_once(gpu, workload, kernel) is None, config
        finally:
            kernel.close()
