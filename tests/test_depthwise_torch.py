"""depthwise_conv2d against PyTorch's grouped convolution and its autograd, on random layers of every direction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from depthwise_support import numpy_depthwise, random_workload

from schedsearch import Workload
from schedsearch.template import load_reference


def torch_results(torch: Any, forward: Workload, arrays: dict[str, Any]) -> dict[str, Any]:
    """y, dx and dw for arrays in NCHW and OIHW, float64, as PyTorch computes them. Padding is written out, because PyTorch's
    convolution takes no asymmetric padding."""
    x, weight = (torch.from_numpy(arrays[name]).requires_grad_() for name in ("x", "weight"))
    top, left, bottom, right = forward.padding
    padded = torch.nn.functional.pad(x, (left, right, top, bottom))
    y = torch.nn.functional.conv2d(padded, weight, None, forward.stride, 0, forward.dilation, forward.c)
    y.backward(torch.from_numpy(arrays["dy"]))
    return {"y": y.detach().numpy(), "dx": x.grad.numpy(), "dw": weight.grad.numpy()}


@pytest.mark.parametrize("seed", range(8))
def test_outputs_are_those_of_a_grouped_convolution(torch: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    forward = random_workload(
        rng, direction="forward", dtype="float32", layout="NCHW", weight_layout="OIHW", epilogue=(), accumulate=False,
        deterministic=False,
    )  # fmt: skip
    arrays = {spec.name: rng.standard_normal(spec.shape) for spec in forward.signature}
    arrays["dy"] = rng.standard_normal(forward.output.shape)
    expected = torch_results(torch, forward, arrays)
    for direction in ("forward", "grad_input", "grad_weight"):
        workload = forward.replace(direction=direction)
        given = {spec.name: arrays[spec.name] for spec in workload.signature}
        name = workload.output.name
        points = load_reference("depthwise_conv2d").points(workload, given, {}, np.arange(workload.output.size), name)
        np.testing.assert_allclose(points.reshape(workload.output.shape), expected[name], rtol=1e-10, atol=1e-10)
        found = numpy_depthwise(workload, {key: array.astype(np.float32) for key, array in given.items()})[name]
        np.testing.assert_allclose(found, expected[name], rtol=1e-3, atol=1e-3)
