"""An `Epilogue` is one value for what follows the sums: in workloads the list of its stages, in calls the keywords."""

from __future__ import annotations

from typing import Any

import pytest

import schedsearch
from schedsearch import Epilogue
from schedsearch.errors import ArgumentError, WorkloadError

SIZES: dict[str, Any] = dict(n=1, h=8, w=8, c=16, k=16, r=3, s=3, padding=1)


@pytest.mark.parametrize(
    ("dtype", "epilogue", "stages"),
    [
        ("float16", Epilogue(), []),
        ("float16", Epilogue(bias=True, activation="relu"), ["bias", "relu"]),
        ("float16", Epilogue(bias=True, scale=True, residual=True, activation="gelu"), ["scale_shift", "residual", "gelu"]),
        ("float16", Epilogue(bias=True, residual=True, activation="silu", residual_last=True), ["bias", "silu", "residual"]),
        ("float16", Epilogue(activation="relu6"), ["clip"]),
        ("float16", Epilogue(pixel_shuffle=2), [{"depth_to_space": {"block": 2, "mode": "CRD"}}]),
        ("int8", Epilogue(bias=True, out_dtype="int32"), ["bias"]),
        ("int8", Epilogue(bias=True, scale=True, out_dtype="uint8"), ["bias", {"requantise": {"to": "uint8"}}]),
        ("int8", Epilogue(bias=True, scale=True, out_dtype="float16"), [{"dequantise": {"to": "float16"}}, "bias"]),
        (
            "int8",
            Epilogue(bias=True, scale=True, activation="relu", output_scale=True, out_dtype="int8"),
            [{"dequantise": {"to": "float32"}}, "bias", "relu", {"quantise": {"to": "int8"}}],
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_workload_takes_it_for_the_list_of_its_stages(dtype: str, epilogue: Epilogue[bool], stages: list[Any]) -> None:
    plain = schedsearch.conv2d(**SIZES, dtype=dtype, epilogue=stages)
    assert schedsearch.conv2d(**SIZES, dtype=dtype, epilogue=epilogue).id == plain.id
    assert schedsearch.Workload.conv2d(**SIZES, dtype=dtype, epilogue=epilogue) == plain
    assert schedsearch.conv2d(**SIZES, dtype=dtype).replace(epilogue=epilogue) == plain


def test_other_operators_take_it_too() -> None:
    epilogue = Epilogue(bias=True, activation="relu")
    stages = ["bias", "relu"]
    assert schedsearch.dense(m=1, n=8, k=8, epilogue=epilogue) == schedsearch.dense(m=1, n=8, k=8, epilogue=stages)
    sizes: dict[str, Any] = dict(n=1, c=8, h=8, w=8, r=3, s=3)
    assert schedsearch.depthwise_conv2d(**sizes, epilogue=epilogue).id == (
        schedsearch.depthwise_conv2d(**sizes, epilogue=stages).id
    )


def test_mistakes_say_what_is_allowed() -> None:
    with pytest.raises(ArgumentError, match=r"no activation 'rleu' \(did you mean 'relu'\?\); allowed: relu, .* or None"):
        schedsearch.conv2d(**SIZES, epilogue=Epilogue(activation="rleu"))
    with pytest.raises(ArgumentError, match="a scale without a bias"):
        schedsearch.conv2d(**SIZES, epilogue=Epilogue(scale=True))
    with pytest.raises(WorkloadError, match=r"conv2d has no parameter 'strid' \(did you mean 'stride'\?\)"):
        schedsearch.conv2d(**SIZES, strid=2)  # type: ignore[call-arg]


def test_calls_of_pytorch_take_it_for_their_keywords() -> None:
    torch = pytest.importorskip("torch")
    sst = pytest.importorskip("schedsearch.torch")
    from torch.nn import functional

    generator = torch.Generator().manual_seed(3)
    x, weight, bias, residual = (
        torch.randn(*shape, generator=generator) for shape in ((1, 8, 6, 6), (8, 8, 3, 3), (8,), (1, 8, 6, 6))
    )
    exact = torch.relu(functional.conv2d(x.double(), weight.double(), bias.double(), padding=1) + residual.double())
    epilogue = sst.Epilogue(bias=bias, residual=residual, activation="relu")
    y = sst.conv2d(x, weight, padding=1, epilogue=epilogue)
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5)
    assert torch.equal(y, sst.conv2d(x, weight, bias, residual, padding=1, activation="relu"))
    narrow = torch.randint(-9, 9, (8, 1, 3, 3), generator=generator).float()
    assert torch.equal(
        sst.depthwise_conv2d(x, narrow, epilogue=sst.Epilogue(activation="clip", low=-1.0, high=2.0)),
        sst.depthwise_conv2d(x, narrow, activation="clip", low=-1.0, high=2.0),
    )
    integers = torch.randint(-9, 9, (1, 8, 6, 6), dtype=torch.int8, generator=generator)
    filters = torch.randint(-9, 9, (8, 8, 3, 3), dtype=torch.int8, generator=generator)
    scale = torch.full((8,), 0.01)
    assert torch.equal(
        sst.quantized_conv2d(integers, filters, epilogue=sst.Epilogue(scale=scale, out_dtype="int8")),
        sst.quantized_conv2d(integers, filters, scale=scale),
    )
    for call, error, message in (
        (lambda: sst.conv2d(x, weight, actvation="relu"), TypeError, "actvation' .did you mean 'activation'"),
        (lambda: sst.conv2d(x, weight, bias, epilogue=epilogue), ArgumentError, "an epilogue and parts of one"),
        (lambda: sst.conv2d(x, weight, epilogue="relu"), ArgumentError, "epilogue is a str; allowed: an Epilogue"),
        (lambda: sst.conv2d(x, weight, epilogue=Epilogue(bias=True)), ArgumentError, "give the tensors"),
        (
            lambda: sst.depthwise_conv2d(x, narrow, epilogue=Epilogue(pixel_shuffle=2)),
            ArgumentError,
            "takes no pixel_shuffle",
        ),
    ):
        with pytest.raises(error, match=message):
            call()
