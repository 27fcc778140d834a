"""Which formats PyTorch computes in, by either of its flags."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: make test-integrations installs it")

from schedsearch.torch.operators.formats import allows_tf32, without_tf32  # noqa: E402

pytestmark = pytest.mark.integrations


@pytest.fixture(params=["one flag", "a flag of convolutions"])
def set_tf32(request: pytest.FixtureRequest) -> Iterator[Any]:
    cudnn = torch.backends.cudnn
    if request.param == "one flag":
        yield lambda on: setattr(cudnn, "allow_tf32", on)
    elif not hasattr(cudnn, "conv"):
        pytest.skip("PyTorch before 2.9 has one flag")
    else:
        before = cudnn.rnn.fp32_precision
        cudnn.rnn.fp32_precision = "ieee"
        yield lambda on: setattr(cudnn.conv, "fp32_precision", "tf32" if on else "ieee")
        cudnn.rnn.fp32_precision = before
    cudnn.allow_tf32 = True


@pytest.mark.parametrize("on", [True, False])
def test_convolutions_take_tf32_as_pytorch_was_told(set_tf32: Any, on: bool) -> None:
    set_tf32(on)
    torch._dynamo.reset()  # it does not guard on the flag of convolutions
    compiled = torch.compile(lambda x: x + allows_tf32(), backend="eager", fullgraph=True)
    for _ in range(2):
        assert allows_tf32() is on and compiled(torch.zeros(1)) == on
        with without_tf32():
            assert not allows_tf32()
