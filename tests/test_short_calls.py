"""The short path of repeated calls: which addresses its launches have."""

from __future__ import annotations

import numpy as np
import pytest

from schedsearch.errors import ArgumentError
from schedsearch.runtime.repeated import address_of
from schedsearch.runtime.short_call import kernel_call

EXTENT = 16


class Launches:
    """A bound kernel that keeps what each launch would read and write. It takes no address that `refused` has."""

    def __init__(self, **addresses: int) -> None:
        self.addresses, self.refused, self.seen = addresses, set[int](), list[dict[str, int]]()

    def set_pointer(self, buffer: str, address: int) -> None:
        if address in self.refused:
            raise ArgumentError(f"{buffer} is not aligned")
        self.addresses[buffer] = address

    def launch(self, stream: int = 0) -> None:
        self.seen.append(dict(self.addresses))


def test_a_repeated_call_launches_with_its_own_addresses_after_one_that_was_refused() -> None:
    a, b, c, d, y = (np.zeros(EXTENT, np.float32) for _ in range(5))
    bound = Launches(a=address_of(a), b=address_of(b), y=address_of(y))
    call = kernel_call(bound, {"a": a, "b": b}, {"y": y}, ("cpu", 0), "numpy")
    bound.refused = {address_of(d)}
    for _ in range(2):
        with pytest.raises(ArgumentError, match="b is not aligned"):
            call((c, d), None)  # a has moved by then
    assert call((a,), None) is None
    assert call((a, b.astype(np.float64)), None) is None
    assert bound.seen == []
    for one, other in ((a, b), (c, b), (b, a), (b, a)):
        result = call((one, other), None)
        assert bound.seen.pop() == {"a": address_of(one), "b": address_of(other), "y": address_of(result)}


def test_a_repeated_call_of_a_kernel_with_several_outputs_makes_each_anew() -> None:
    x, y, z = np.zeros(EXTENT, np.float32), np.zeros((4, 2), np.int8), np.zeros((2, 3), np.float64).T
    bound = Launches(x=address_of(x), y=address_of(y), z=address_of(z))
    call = kernel_call(bound, {"x": x}, {"y": y, "z": z}, ("cpu", 0), "numpy")
    kept = [call((x,), None) for _ in range(3)]
    for (one, other), seen in zip(kept, bound.seen, strict=True):
        assert (one.shape, one.dtype, one.strides) == (y.shape, y.dtype, y.strides)
        assert (other.shape, other.dtype, other.strides) == (z.shape, z.dtype, z.strides)
        assert seen == {"x": address_of(x), "y": address_of(one), "z": address_of(other)}
    assert len({address_of(each) for pair in [(y, z), *kept] for each in pair}) == 8
