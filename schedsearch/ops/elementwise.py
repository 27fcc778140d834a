"""elementwise: a small expression of arrays, such as `relu(a + b)`, computed for every element in one kernel.

`expression` is a string of `schedsearch.ops.expressions`. Each of its names is an input. It has y's extents, or extents
that broadcast to them by NumPy's rule: aligned at the end, and 1 or missing where the input is repeated. In NHWC, [256] is a
number for each channel and [32, 1, 1, 256] one for each image and channel; in NCHW, [256, 1, 1] is one for each channel.

An input may be a slice of a larger array, which kernels then take in place of the slice.

Kernels take the inputs in the order of `inputs` and write y. They widen every float, int8 and uint8 to float32, compute in
float32, and round once at the end: to the nearest float, half to even, or to the nearest integer, half to even, within the
range of an integer format. Inputs of longer integer formats, comparisons and `int64(...)` are integers of 64 bits, whose
arithmetic wraps; an integer that y gets keeps the bits that its format has. See `schedsearch.ops.expression_types`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from schedsearch.errors import Problem
from schedsearch.ops.base import Op
from schedsearch.ops.checks import Domain
from schedsearch.ops.data_movement import AXES, extents, shown, too_large
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.expression_types import Typed, typed
from schedsearch.ops.expressions import Expression, ExpressionError, parse_expression
from schedsearch.ops.params import (
    MAX_INT,
    Parameter,
    Params,
    declared,
    frozen,
    is_int,
    judge,
    missing_parameters,
    one_of,
    plain,
    unknown_parameters,
)
from schedsearch.ops.slices import SLICE_OF, slice_problems, slice_words, sliced, without_own_shape
from schedsearch.ops.specs import ArgSpec, Work
from schedsearch.typed import GivenParams, ParamsByName

# (name, dtype, extents), and of a slice (slice_of, begin, strides)
Input = (
    tuple[str, str, tuple[int, ...]] | tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]
)

DTYPES = (
    *("float16", "bfloat16", "float32", "int8", "uint8"),
    *("int16", "uint16", "int32", "uint32", "int64"),
)
MAX_INPUTS = 16
_SAMPLES = 4096  # for which the numbers for verification must give finite results
_MIXTURES = 400  # choices of numbers for verification that are tried if none of one kind for all inputs will do
_ROUNDINGS = 1  # of a number before it becomes an integer; the reference's magnitude has them all


@dataclass(frozen=True, eq=False, kw_only=True)
class ElementwiseParams(Params):
    """See `elementwise`."""

    y: tuple[int, ...] = declared(extents(f"extents of y, 1 to {len(AXES)} of them"))
    expression: str = declared(Parameter("the value of an element of y, e.g. relu(a + b)", {"type": "string"}))
    inputs: tuple[Input, ...] = declared(
        Parameter(
            "each input: its name, [name, dtype] or [name, dtype, extents], or [name, dtype, extents, slice_of, "
            "begin, strides] "
            "of a slice; default: the names in the expression, all like y",
            {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS},
        )
    )
    dtype: str = declared(Parameter.choice("of inputs that do not say, and of y; default float16", DTYPES))
    out_dtype: str = declared(Parameter("of y; default: dtype", {"enum": list(DTYPES)}))
    slice_of: tuple[int, ...] = declared(SLICE_OF)


_PARAMETERS = ElementwiseParams.parameters()
_SIZES = {name: _PARAMETERS[name] for name in ("y", "expression")}


class Read(NamedTuple):
    """An entry of `inputs`.

    Attributes:
        shape: extents of the input, which broadcast to those of y.
        slice_of: extents of a larger array of which the input is a slice, and which kernels take; (): an array of its own.
        begin, strides: of the slice along each axis of the larger array: the first position, and the distance of positions.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    slice_of: tuple[int, ...] = ()
    begin: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()

    @property
    def array(self) -> tuple[int, ...]:
        """Extents of the array that kernels take."""
        return self.slice_of or self.shape

    @property
    def starts(self) -> tuple[int, ...]:
        return self.begin or (0,) * len(self.shape)

    @property
    def steps(self) -> tuple[int, ...]:
        return self.strides or (1,) * len(self.shape)

    @property
    def part(self) -> tuple[int, ...]:
        """As of an `ArgSpec`; () of a slice along several axes, too."""
        cut = [axis for axis, (n, whole) in enumerate(zip(self.shape, self.array)) if n != whole]
        if len(cut) != 1 or self.steps[cut[0]] != 1:
            return ()
        inner = math.prod(self.array[cut[0] + 1 :])
        return self.starts[cut[0]] * inner, self.shape[cut[0]] * inner, self.array[cut[0]] * inner

    @property
    def cut(self) -> str:
        """The slice in the words of Python, e.g. ":,2:3"."""
        words = []
        for n, whole, first, step in zip(self.shape, self.array, self.starts, self.steps):
            own = f"{first}:{first + (n - 1) * step + 1}" + (f":{step}" if step != 1 else "")
            words.append(":" if n == whole else own)
        return ",".join(words)


def reads_of(params: ElementwiseParams) -> tuple[Read, ...]:
    """The inputs of a workload's parameters."""
    return tuple(Read(*each) for each in params.inputs)


def typed_of(params: ElementwiseParams) -> Typed:
    """The expression of a workload's parameters, for the dtypes of its inputs."""
    return typed(parse_expression(params.expression), tuple((each[0], each[1]) for each in params.inputs))


class Elementwise(Op[ElementwiseParams]):
    params_type: ClassVar[type[Params]] = ElementwiseParams
    name: ClassVar[str] = "elementwise"
    reference: ClassVar[str] = "schedsearch.templates.elementwise.reference:ElementwiseReference"
    constructor: ClassVar[str] = "schedsearch:elementwise"

    def defaults(self, params: GivenParams) -> ParamsByName:
        dtype = params.get("dtype", "float16")
        optional = {"dtype": "float16", "out_dtype": dtype, "inputs": (), "slice_of": ()}
        try:
            names = parse_expression(params["expression"]).inputs
            optional["inputs"] = tuple((name, dtype, frozen(params["y"])) for name in names)
        except (ExpressionError, KeyError, TypeError):  # `normalise` says what is wrong
            pass
        return optional

    def normalise(self, params: Mapping[str, object]) -> tuple[ParamsByName, list[Problem]]:
        params = {key: plain(value) for key, value in params.items()}
        problems = unknown_parameters(self.name, params, _PARAMETERS) + missing_parameters(params, _SIZES)
        out = {**self.defaults(params), **{key: params[key] for key in _PARAMETERS if key in params}}
        out = {key: frozen(out[key]) for key in _PARAMETERS if key in out}
        for key in ("y", "expression", "inputs", "slice_of"):
            if key in params and (complaint := judge(params[key], _PARAMETERS[key].schema)):
                problems.append(Problem(key, f"{key} {complaint}"))
        for key in ("dtype", "out_dtype"):
            problems += one_of(key, out[key], DTYPES)
        if problems:
            return out, problems
        try:
            expression = parse_expression(out["expression"])
        except ExpressionError as error:
            return out, [Problem("expression", f"expression {error}")]
        out["expression"] = expression.text
        found = [_input(each, out) for each in out["inputs"]]
        problems = [each for each in found if isinstance(each, Problem)]
        if not problems:
            out["inputs"] = tuple(found)
            problems = _names_problems(expression, [each[0] for each in out["inputs"]])
            problems = problems or _type_problems(expression, out["inputs"])
        if not problems:
            y = self.outputs(self.typed(out | {"slice_of": ()}))[0]
            problems = slice_problems(y, out["slice_of"])
            out["slice_of"] = without_own_shape(y, out["slice_of"])
        return out, problems or too_large("y", out["slice_of"] or out["y"], 4)

    def arguments(self, params: ElementwiseParams) -> tuple[ArgSpec, ...]:
        axes = AXES[: len(params.y)]
        return tuple(
            ArgSpec(each.name, axes[-len(each.shape) :], each.array, each.dtype, part=each.part) for each in reads_of(params)
        )

    def outputs(self, params: ElementwiseParams) -> tuple[ArgSpec, ...]:
        found = typed_of(params)
        is_float = dtype_of(params.out_dtype).is_float
        y = ArgSpec(
            "y", AXES[: len(params.y)], params.y, params.out_dtype,
            roundings=0 if is_float or found.whole else _ROUNDINGS, undecided=not (is_float or found.decided),
        )  # fmt: skip
        return (sliced(y, params),)

    def work(self, params: ElementwiseParams) -> Work:
        """The elements of inputs and of y. What lies around a slice need not be read."""
        y = self.outputs(params)[0].nbytes
        return Work(0, y + sum(math.prod(each.shape) * dtype_of(each.dtype).nbytes for each in reads_of(params)))

    def check_inputs(self, params: ElementwiseParams) -> Mapping[str, Domain]:
        """Numbers for which samples of y are finite: of both signs if possible. No two inputs share a number, so that
        differences are not zero. Integers are those of their format if possible, and zero points are integers."""
        return _domains(params.expression, reads_of(params), params.out_dtype)

    def label(self, params: ElementwiseParams) -> str:
        dtypes = dict.fromkeys([*(each[1] for each in params.inputs), params.out_dtype])
        words = [f"elementwise {shown(params.y)}", f'"{params.expression}"']
        words.append("-".join(dtype_of(each).short for each in dtypes))
        words += [f"{each.name} in {shown(each.array)} [{each.cut}]" for each in reads_of(params) if each.slice_of]
        return " ".join([*words, *slice_words(params)])


ELEMENTWISE = Elementwise()


def _input(given: object, p: GivenParams) -> tuple[Any, ...] | Problem:
    """An input in full, or what is wrong with it."""
    entry = (given,) if isinstance(given, str) else given
    if not isinstance(entry, tuple) or len(entry) not in (1, 2, 3, 5, 6) or not isinstance(entry[0], str):
        return Problem(
            "inputs",
            f"inputs has {given!r}; allowed: a name, [name, dtype], [name, dtype, extents] or [name, dtype, extents, "
            "slice_of, begin, strides]",
        )
    name, dtype, shape = (*entry[:3], *(p["dtype"], p["y"])[len(entry[:3]) - 1 :])
    if wrong := one_of("inputs", dtype, DTYPES):
        return Problem("inputs", f"input {name}: {wrong[0].message}")
    known = _numbers(shape, 1)
    if not known or len(shape) > len(p["y"]) or any(n not in (1, m) for n, m in zip(shape[::-1], p["y"][::-1])):
        got = shown(shape) if known else repr(shape)
        return Problem(
            "inputs",
            f"input {name} has the extents {got}, which do not broadcast to y's {shown(p['y'])}; allowed: from the last "
            "extent on, 1 or that of y",
        )
    if len(entry) <= 3:
        return name, dtype, shape
    slice_of, begin, strides = (*entry[3:], (1,) * len(shape))[:3]
    if not (_numbers(slice_of, 1) and _numbers(begin, 0) and _numbers(strides, 1)) or not (
        len(slice_of) == len(begin) == len(strides) == len(shape)
    ):
        return Problem(
            "inputs",
            f"input {name} is a slice with slice_of {slice_of!r}, begin {begin!r} and strides {strides!r}; allowed: a list "
            f"for each, with {len(shape)} integers, of which those of begin are at least 0 and others at least 1",
        )
    strides = tuple(step if n > 1 else 1 for step, n in zip(strides, shape))
    last = [first + (n - 1) * step for first, n, step in zip(begin, shape, strides)]
    if any(at >= whole for at, whole in zip(last, slice_of)):
        return Problem(
            "inputs",
            f"input {name} of extents {shown(shape)} from {list(begin)} on with strides {list(strides)} is beyond "
            f"{shown(slice_of)}; allowed: a slice of it",
        )
    if too_large(name, slice_of, dtype_of(dtype).nbytes):
        return Problem("inputs", f"input {name}: {too_large(name, slice_of, dtype_of(dtype).nbytes)[0].message}")
    return (name, dtype, shape) if slice_of == shape else (name, dtype, shape, slice_of, begin, strides)


def _numbers(given: object, least: int) -> bool:
    """Whether these are integers, each at least `least`."""
    return isinstance(given, tuple) and bool(given) and all(is_int(each) and least <= each <= MAX_INT for each in given)


def _names_problems(expression: Expression, names: Sequence[str]) -> list[Problem]:
    if sorted(names) != sorted(expression.inputs):
        wanted = ", ".join(expression.inputs)
        return [Problem("inputs", f"inputs are {', '.join(names)}, but the expression has {wanted}; give each of them once")]
    if len(names) > MAX_INPUTS:
        return [Problem("expression", f"expression has {len(names)} inputs; at most {MAX_INPUTS} are possible")]
    if "y" in names:
        return [Problem("expression", "expression has an input y, which is the name of the output; give it another name")]
    return []


def _type_problems(expression: Expression, inputs: Sequence[tuple[Any, ...]]) -> list[Problem]:
    try:
        typed(expression, tuple((each[0], each[1]) for each in inputs))
    except ExpressionError as error:
        return [Problem("expression", f"expression {error}")]
    return []


@functools.lru_cache(maxsize=256)
def _domains(text: str, inputs: tuple[Read, ...], out_dtype: str) -> Mapping[str, Domain]:
    """Numbers for which the expression is finite: all inputs of one kind if that does, otherwise each of its own.

    `sqrt(a - b * b)`, for example, is undefined for most numbers unless `a` is drawn from larger ones than `b`.
    """
    import numpy as np

    expression, largest = parse_expression(text), dtype_of(out_dtype).largest / 2
    dtypes = tuple((each.name, each.dtype) for each in inputs)
    rng = np.random.default_rng(0)
    alike = ([kind] * len(inputs) for kind in itertools.product((127, 15, 3), (-1, 0, 1), (1.0,)))
    kinds = list(itertools.product((15, 3), (-1, 0, 1), (1.0, 0.25, 0.0625, -0.25)))
    mixed = ([kinds[at] for at in rng.integers(0, len(kinds), len(inputs))] for _ in range(_MIXTURES))
    best: tuple[int, Mapping[str, Domain]] = (-1, {})
    for chosen in itertools.chain(alike, mixed):
        domains = {
            name: _domain(number, dtype, name in expression.zero_points, expression.middles.get(name, 0), *kind)
            for number, ((name, dtype, *_), kind) in enumerate(zip(inputs, chosen))
        }
        draws = np.random.default_rng(0)
        drawn = {name: draws.choice(np.asarray(domain.values, float), _SAMPLES) for name, domain in domains.items()}
        values = np.abs(typed(expression, dtypes).evaluate(drawn))
        good = np.isfinite(values) & (not dtype_of(out_dtype).is_float or values <= largest)
        count = int(np.count_nonzero(np.broadcast_to(good, _SAMPLES)))
        if count > best[0]:
            best = count, domains
        if count == _SAMPLES:
            break
    return best[1]


def _domain(number: int, dtype: str, is_zero_point: bool, middle: int, whole: int, sign: int, scale: float) -> Domain:
    """Numbers of an input: of both signs (`sign` -1), positive (0) or at least 1 (1), by `scale`; integers up to `whole`
    from the `middle`, which stands for 0."""
    row = dtype_of(dtype)
    if row.is_float and is_zero_point:  # every 8-bit format has these
        return Domain(range(16))
    if row.is_float:  # 16 k + 8 + number sixty-fourths have at most 8 bits
        parts = range(-16 if sign < 0 else 0, 16)
        offset = 1.0 if sign > 0 else 0.0
        return Domain(tuple(scale * ((16 * k + 8 + number % 8) / 64 + offset * (k >= 0)) for k in parts))
    lowest, largest = int(row.lowest), int(row.largest)
    middle = min(max(middle, lowest), largest)
    if middle == largest:  # nothing is positive
        sign = -1
    return Domain(range(max(lowest, middle - whole if sign < 0 else middle + 1), min(middle + whole, largest) + 1))
