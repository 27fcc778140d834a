"""Fuzzes calls of kernels: an argument is refused with an ArgumentError, or the result is right and nothing else changes.

The kernel runs on the CPU. Arguments are arrays of NumPy in every shape, dtype, order and place, and objects that are no
arrays or pretend to be some. Memory around arrays is watched. A library cannot notice an object that names memory that it
does not have, so none does that.
"""

from __future__ import annotations

import contextlib
import functools
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from conv2d_numpy import numpy_conv2d

import schedsearch
from schedsearch.errors import UsageError

from . import fuzzing, sample_database
from .commands import check_error
from .fuzzing import Broken, Result

NAME = "arguments"
WORKLOAD = schedsearch.Workload.conv2d(
    n=1, h=6, w=5, c=4, k=8, r=3, s=3, padding=1, dtype="float32", epilogue=("bias", "leaky_relu")
)
SLOPE = "leaky_relu_slope"
_GUARD_ITEMS = 64
_GUARD = np.float32(-12345.5)
_DTYPES = ("f4", "f8", "f2", "i4", "u1", "c8", ">f4", "?", "O", "U4", "M8[s]", "V4")


class Interface:
    """An object with an `__array_interface__` of its own."""

    def __init__(self, interface: Any, array: Any) -> None:
        self.__array_interface__ = interface
        self._array = array  # keeps the memory that it names


class Capsule:
    """An object that claims DLPack."""

    def __init__(self, device: Any, capsule: Any) -> None:
        self._device, self._capsule = device, capsule

    def __dlpack_device__(self) -> Any:
        return self._device

    def __dlpack__(self, **options: Any) -> Any:
        return self._capsule


class Arguments:
    """See `fuzzing.Fuzzer`."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "some.db"
            sample_database.make_one(path, WORKLOAD)
            self._database = path.read_bytes()

    @functools.cached_property
    def _kernel(self) -> schedsearch.Kernel:
        """The kernel, loaded in the worker: its threads do not survive a fork."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "some.db"
            path.write_bytes(self._database)
            return schedsearch.compile(WORKLOAD, path, target="cpu", allow=("exact",))

    def case(self, random: random.Random, folder: Path) -> str:
        arrays = {spec.name: _guarded(spec.shape, random) for spec in WORKLOAD.signature}
        given: dict[str, Any] = dict(arrays)
        options: dict[str, Any] = {}
        if random.random() < 0.4:
            options["out"] = _guarded(WORKLOAD.output.shape, random)
        for _ in range(random.choice((0, 1, 1, 1, 2))):
            _disturb(given, options, random)
        order = list(WORKLOAD.signature)
        split = random.randrange(len(order) + 1)
        position = [given.pop(spec.name) for spec in order[:split] if spec.name in given]
        outs = options.get("out")
        watched = _watched([*arrays.values(), *position, *given.values(), *(outs if isinstance(outs, tuple) else [outs])])
        try:
            got = self._call(position, given, options, random)
        except UsageError as error:
            check_error(error, (), "the call")
            return "refused"
        self._check(got, position, given, options)
        _check_unchanged(watched, got)
        return "computed"

    def _call(self, position: list[Any], given: dict[str, Any], options: dict[str, Any], random: random.Random) -> Any:
        how = random.random()
        if how < 0.8:
            return self._kernel(*position, **given, **options)
        if how < 0.9 and "stream" not in options:
            return self._kernel.bind(*position, **given, **options)()
        constant = {name: given[name] for name in ("weight", "bias") if name in given}
        prepared = self._kernel.prepare(**constant)
        return self._kernel(*position, **{**given, **prepared}, **options)

    @staticmethod
    def _check(got: Any, position: list[Any], given: dict[str, Any], options: dict[str, Any]) -> None:
        """The result is what NumPy computes of the arrays that were given."""
        arrays = dict(zip((spec.name for spec in WORKLOAD.signature), position)) | given
        arrays |= {name: array for name, array in options.items() if name in ("x", "weight", "bias")}
        slope = float(options.get(SLOPE, given.get(SLOPE, 0.01)))
        plain: dict[str, Any] = {}
        for spec in WORKLOAD.signature:
            array = np.array(arrays[spec.name], dtype=np.float32)
            plain[spec.name] = array if array.shape == spec.shape else array.transpose(0, 2, 3, 1)
        wanted = numpy_conv2d(WORKLOAD, plain, {SLOPE: slope})
        result = np.asarray(got)
        if result.shape != WORKLOAD.output.shape:
            result = result.transpose(0, 2, 3, 1)
        if np.isfinite(wanted).all() and np.abs(wanted).max() < 1e30:
            np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-3)


def _guarded(shape: tuple[int, ...], rng: random.Random) -> Any:
    """An array inside a larger one whose other items are guards."""
    size = int(np.prod(shape))
    whole = np.full(size + 2 * _GUARD_ITEMS, _GUARD, np.float32)
    inside = whole[_GUARD_ITEMS : _GUARD_ITEMS + size]
    inside[:] = np.random.default_rng(rng.randrange(1 << 30)).standard_normal(size)
    return inside.reshape(shape)


def _whole(array: Any) -> Any:
    while isinstance(array, np.ndarray) and array.base is not None and isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _watched(arrays: list[Any]) -> list[tuple[Any, bytes]]:
    return [
        (_whole(array), _whole(array).tobytes()) for array in arrays if isinstance(array, np.ndarray) and array.dtype != "O"
    ]


def _check_unchanged(watched: list[tuple[Any, bytes]], got: Any) -> None:
    """Arguments are only read, and the memory around a result stays as it was."""
    result = np.asarray(got)
    for array, before in watched:
        after = np.frombuffer(array.tobytes(), np.uint8)
        changed = after != np.frombuffer(before, np.uint8)
        if np.shares_memory(array, result):
            start = result.__array_interface__["data"][0] - array.__array_interface__["data"][0]
            changed[start : start + result.nbytes] = False
        if changed.any():
            raise Broken(f"the call changed {changed.sum()} bytes that are not its result, the first at {changed.argmax()}")


def _disturb(given: dict[str, Any], options: dict[str, Any], rng: random.Random) -> None:
    """Changes one argument, or the way in which it is given."""
    how = rng.randrange(12)
    names = [spec.name for spec in WORKLOAD.signature]
    name = rng.choice([*names, "out"])
    holder = options if name == "out" else given
    if how == 0:
        holder.pop(name, None)
    elif how == 1:
        options[rng.choice(("alpha", "", "X", "weights", SLOPE + "s", "mode"))] = 1
    elif how in (2, 3):
        options[SLOPE] = rng.choice(
            (0, 1, -2.5, 0.3, True, "1", "x", None, [], 10**400, 1e300, float("inf"), np.float64(2), np.array([1, 2]), 1j)
        )
    elif how == 4:
        options["stream"] = rng.choice((None, 0, 1, -1, "x", 2**70, [], 1.5, object()))
    elif how == 5:
        options["out"] = rng.choice(
            (lambda: given.get("x"), lambda: (), list, dict, lambda: {"y": None}, lambda: {"z": 1},
             lambda: (_guarded(WORKLOAD.output.shape, rng),), lambda: {"y": _guarded(WORKLOAD.output.shape, rng)})
        )()  # fmt: skip
    else:
        spec = WORKLOAD.output if name == "out" else next(each for each in WORKLOAD.signature if each.name == name)
        array = holder.get(name)
        given_array = array if isinstance(array, np.ndarray) else _guarded(spec.shape, rng)
        with contextlib.suppress(IndexError, ValueError):  # an array that was changed before may not take this change
            holder[name] = rng.choice(_ARRAYS)(given_array, rng)


def _overlapping(array: Any, rng: random.Random) -> Any:
    whole = _whole(array).reshape(-1)
    start = rng.randrange(2 * _GUARD_ITEMS + 1)
    return whole[start : start + array.size].reshape(array.shape) if whole[start:].size >= array.size else array


def _interface(array: Any, rng: random.Random) -> Any:
    """The true interface of an array with one entry that is missing or makes no sense."""
    true = dict(array.__array_interface__)
    odd = {
        "shape": ((), (-1,), ("x",), None, (2**70,), [1, 2], 5, (True,), (1.5,)),
        "typestr": ("", "x", None, "<f9", "O", "|V4", "<f4x", 4, "<c8"),
        "data": (None, (0, False), (None, False), ("x", False), (), (2**70, False), (0, True), 5, (0.5, 1)),
        "strides": (
            (),
            (-4,) * array.ndim,
            ("x",) * array.ndim,
            5,
            (3,) * array.ndim,
            (2**70,) * array.ndim,
            (0,) * array.ndim,
        ),
    }
    key = rng.choice(list(odd))
    if rng.random() < 0.2:
        true.pop(key, None)
    else:
        true[key] = rng.choice(odd[key])
    return Interface(true if rng.random() < 0.95 else rng.choice((None, 5, [], {})), array)


def _no_array(array: Any, rng: random.Random) -> Any:
    return rng.choice(
        (None, 1, "x", b"x", [], [[1.0]], {}, object(), array.tolist(), memoryview(np.ascontiguousarray(array)), array.shape,
         Capsule((1, 0), None), Capsule((9, 0), None), Capsule(None, None), Capsule((1,), 5), Capsule("x", ""), np.nan)
    )  # fmt: skip


# Each makes another argument of a proper array.
_ARRAYS: tuple[Callable[[Any, random.Random], Any], ...] = (
    lambda a, r: a.astype(r.choice(_DTYPES), casting="unsafe"),
    lambda a, r: a[..., :-1] if r.random() < 0.5 else a[:0],
    lambda a, r: a.reshape(-1) if r.random() < 0.5 else a[None],
    lambda a, r: a.T if r.random() < 0.5 else np.asfortranarray(a),
    lambda a, r: a[..., ::-1] if r.random() < 0.5 else a[::-1],
    lambda a, r: np.repeat(a, 2, axis=-1)[..., ::2],
    lambda a, r: np.broadcast_to(a.reshape(-1)[:1], a.shape),
    lambda a, r: a.transpose(0, 3, 1, 2) if a.ndim == 4 else a,
    lambda a, r: np.ascontiguousarray(a.transpose(0, 3, 1, 2)).transpose(0, 2, 3, 1) if a.ndim == 4 else a,
    lambda a, r: np.frombuffer(b"\0" + a.tobytes(), np.uint8)[1:].view(np.float32).reshape(a.shape),  # not aligned
    lambda a, r: np.frombuffer(a.tobytes(), np.float32).reshape(a.shape),  # read-only
    lambda a, r: np.ma.masked_array(a, mask=a > 0),
    lambda a, r: a * np.float32(r.choice((np.nan, np.inf, 1e38, 0.0))),
    lambda a, r: np.zeros((), np.float32) if r.random() < 0.5 else np.float32(1),
    lambda a, r: np.zeros(a.shape, [("f", "f4")]) if r.random() < 0.5 else a.view(np.recarray),
    _overlapping,
    _interface,
    _interface,
    _no_array,
    _no_array,
)


def run(seed: int, count: int, folder: Path, deadline_s: float | None = None, first: int = 0, **options: Any) -> Result:
    """See `fuzzing.run`."""
    return fuzzing.run(NAME, Arguments(), seed, count, folder, deadline_s, first=first, **options)
