"""Epilogue stages: what an operator does with its accumulated value before it is cast and stored.

A stage is an entry of `STAGES`: its operands, call-time scalars, parameters, and its definition in NumPy. `epilogues`
makes an operator's arguments, scalars and outputs from the list of its stages; references compute with `apply`.
To add a stage, add an entry here and its device code in `templates/parts/stages.py`. Templates refuse stages without code.

See docs/decisions/032-stages-with-parameters.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from schedsearch.ops.checks import Domain
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.expression_functions import FUNCTIONS
from schedsearch.ops.params import Parameter, frozen, schema_defaults
from schedsearch.ops.pixel_shuffle import MAX_BLOCK, MODES, shuffled
from schedsearch.ops.specs import ArgSpec, Role, ScalarSpec
from schedsearch.typed import Array, GivenParams, ParamsByName

# (value, operands by name, scalars by name, the stage's parameters) -> value; float64 arrays of one shape.
Apply = Callable[["Array", GivenParams, Mapping[str, float], GivenParams], "Array"]


@dataclass(frozen=True)
class Operand:
    """An array argument that a stage adds to its operator.

    Attributes:
        axes: K: one element for each output channel; y: like the output at that stage.
        dtype: "vector": the format of per-channel numbers, which is that of the operator's input if it is a float of
            at least two bytes, float32 if it is float8, else the value's 32 bits before `dequantise` and float32 behind it;
            "output": that of the output at that stage; the name of a parameter of the stage, which says it; or a concrete
            one.
        constant, positive, role: as in `ArgSpec`.
        aliases: it may be the same memory as the output.
    """

    name: str
    axes: Literal["K", "y"]
    dtype: str = "vector"
    role: Role = "data"
    constant: bool = False
    aliases: bool = False
    positive: bool = False


def _same_output(output: ArgSpec, params: Mapping[str, object]) -> ArgSpec:
    return output


def _same_bound(
    bound: object, operands: Mapping[str, object], scalars: Mapping[str, float], params: Mapping[str, object]
) -> Any:
    return bound


@dataclass(frozen=True)
class StageKind:
    """The description of one stage.

    Attributes:
        apply: `apply(value, operands, scalars, params) -> value`, the definition in NumPy. `value` is float64. Operands are
            float64 arrays that are already gathered to the value's elements, so that all shapes are equal.
        magnitude: the same for the bound on rounding errors, which starts as sum |x| |weight|: an addend adds its absolute
            value, a factor multiplies by its own. By default the bound is unchanged, which suits stages that bring values
            closer together.
        output: `output(spec, params) -> spec`, the output's shape and dtype after the stage; unchanged by default.
        check: `check(spread) -> {name: value}`, the scalars' values for verification, given the standard deviation of the
            sums; by default the scalars' defaults.
        check_inputs: `check_inputs(spread) -> {operand: domain}`, the operands for verification; by default their roles
            decide.
        takes: the kinds of numbers that the stage can take.
        takes_float8_sums: it also takes float32 sums of products of float8.
        repeatable: the stage may occur more than once; it then has no operands and no scalars.
        moves: the stage computes nothing: it says where elements of the output lie. It is the last one, and takes every kind
            of number.
    """

    name: str
    doc: str
    apply: Apply
    operands: tuple[Operand, ...] = ()
    scalars: tuple[ScalarSpec, ...] = ()
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    repeatable: bool = False
    magnitude: Apply = _same_bound
    output: Callable[[ArgSpec, GivenParams], ArgSpec] = _same_output
    check: Callable[[float], Mapping[str, float]] | None = None
    check_inputs: Callable[[float], Mapping[str, Domain]] | None = None
    takes: Sequence[Literal["float", "int", "uint"]] = ("float", "int", "uint")
    takes_float8_sums: bool = False
    moves: bool = False

    def problem(self, value: ArgSpec, *, of_float8: bool = False) -> str:
        """Why the stage cannot take the value of the stage before it; empty if it can.

        Args:
            of_float8: the operator's factors are float8.
        """
        kind = dtype_of(value.dtype).kind
        if self.moves:
            return ""
        if of_float8 and self.takes_float8_sums:
            return ""
        if kind in self.takes and (kind == "float" or dtype_of(value.dtype).nbytes == 4):
            return ""
        if kind == "float":
            factors = "int8, uint8 or float8" if self.takes_float8_sums else "int8 or uint8"
            return f"needs the 32-bit sums of {factors}, got {value.dtype}; leave it out"
        if "float" in self.takes and "int" not in self.takes:
            return f"needs floating-point numbers, got {value.dtype}; put dequantise before it"
        return f"needs 32-bit sums, got {value.dtype}; put it before requantise"

    def defaults(self) -> ParamsByName:
        """The values of the optional parameters."""
        return schema_defaults(self.parameters)

    def schema(self) -> ParamsByName:
        """JSON Schema of the stage in a workload file: a word, or {name: {parameter: value}}."""
        if not self.parameters:
            return {"const": self.name}
        properties = {name: {**each.schema, "description": each.doc} for name, each in self.parameters.items()}
        required = [name for name in self.parameters if name not in self.defaults()]
        inner: ParamsByName = {"type": "object", "properties": properties, "additionalProperties": False}
        inner |= {"required": required} if required else {}
        outer = {"type": "object", "properties": {self.name: inner}, "required": [self.name], "additionalProperties": False}
        return outer if required else {"anyOf": [{"const": self.name}, outer]}


class Stage:
    """One stage of an epilogue, with its parameters. Immutable and hashable.

    Attributes:
        name: key of `STAGES`.
        params: parameter -> value, defaults included.
    """

    __slots__ = ("name", "params")
    name: str
    params: GivenParams

    def __init__(self, name: str, params: GivenParams = MappingProxyType({})) -> None:
        object.__setattr__(self, "name", name)
        own = {**STAGES[name].defaults(), **params} if name in STAGES else params
        object.__setattr__(self, "params", MappingProxyType({key: frozen(own[key]) for key in sorted(own)}))

    @property
    def kind(self) -> StageKind:
        return STAGES[self.name]

    def to_json(self) -> Any:
        """The bare word when all parameters have their defaults, else {name: {parameter: value}} of the others."""
        defaults = self.kind.defaults()
        given = {key: value for key, value in self.params.items() if key not in defaults or defaults[key] != value}
        return {self.name: given} if given else self.name

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Stage is immutable: cannot set {name!r}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stage) and (self.name, self.params) == (other.name, other.params)

    def __hash__(self) -> int:
        return hash((self.name, tuple(self.params.items())))

    def __str__(self) -> str:
        form = self.to_json()
        if isinstance(form, str):
            return form
        return f"{self.name}({', '.join(f'{key}={value}' for key, value in form[self.name].items())})"

    def __repr__(self) -> str:
        """The text of the stage for `epilogue=[...]` in a program."""
        return repr(self.to_json())

    def __reduce__(self) -> tuple[object, ...]:
        return Stage, (self.name, dict(self.params))


def _clip_bounds(spread: float) -> dict[str, float]:
    low = -max(1.0, float(round(spread)))
    return {"clip_min": low, "clip_max": -2.0 * low + 1.0}


def _clip(value: Array, operands: Mapping[str, Array], scalars: Mapping[str, float], params: GivenParams) -> Array:
    import numpy as np

    return np.minimum(np.maximum(value, scalars["clip_min"]), scalars["clip_max"])


def _requantise(value: Array, operands: GivenParams, scalars: Mapping[str, float], params: GivenParams) -> Array:
    import numpy as np

    row = dtype_of(params["to"])
    scaled = np.float32(value) * np.float32(operands["requantise_scale"])  # one rounding to float32 each
    found: Array = np.clip(np.rint(scaled).astype(np.float64) + scalars["y_zero_point"], row.lowest, row.largest)
    return found


def _requantise_add(value: Array, operands: GivenParams, scalars: Mapping[str, float], params: GivenParams) -> Array:
    import numpy as np

    middle = _requantise(value, operands, {"y_zero_point": scalars["middle_zero_point"]}, {"to": params["middle"]})
    total = np.zeros(np.shape(value), np.float32)
    for whole, name in ((middle, "middle"), (operands["residual"], "residual")):
        total += np.float32(whole - scalars[f"{name}_zero_point"]) * np.float32(scalars[f"{name}_scale"])
    total = np.maximum(total, np.float32(0)) if params["relu"] else total
    quotient, row = total / np.float32(scalars["y_scale"]), dtype_of(params["to"])
    found: Array = np.clip(np.rint(quotient).astype(np.float64) + scalars["y_zero_point"], row.lowest, row.largest)
    return found


def _quantise(value: Array, operands: GivenParams, scalars: Mapping[str, float], params: GivenParams) -> Array:
    import numpy as np

    row = dtype_of(params["to"])
    found: Array = np.clip(value / operands["quantise_scale"] + scalars["y_zero_point"], row.lowest, row.largest)
    return found


def _dequantise(value: Array, operands: GivenParams, scalars: object, params: GivenParams) -> Array:
    found: Array = value * operands["dequantise_scale"]
    return found


def _to(output: ArgSpec, params: GivenParams) -> ArgSpec:
    return replace(output, dtype=params["to"])


# Numbers for verification. A middle of integers and a residual of halves, in units of y: many quotients are so close to
# a half that a kernel that rounds once more, or once less, finds another neighbour.
_ADDITION = {
    "middle_scale": float.fromhex("0x1.666666p-1"), "middle_zero_point": 7.0,
    "residual_scale": float.fromhex("0x1.666666p-2"), "residual_zero_point": 5.0,
    "y_scale": float.fromhex("0x1.666666p-1"), "y_zero_point": 3.0,
}  # fmt: skip


def _requantise_scales(spread: float) -> dict[str, Domain]:
    """Scales that bring the sums to the range of 8 bits, so that some saturate. They are powers of two, times 3 for some:
    many products then lie exactly between two integers."""
    unit = 2.0 ** round(math.log2(32.0 / max(spread, 1.0)))
    return {"requantise_scale": Domain((unit / 2, unit, 3 * unit / 4, 2 * unit))}


def _quantise_scales(spread: float) -> dict[str, Domain]:
    """Scales that bring numbers as large as the sums to the range of 8 bits; powers of two, times 3 for some."""
    unit = 2.0 ** round(math.log2(max(spread, 1.0) / 32.0))
    return {"quantise_scale": Domain((unit / 2, unit, 3 * unit / 2, 2 * unit))}


def _relu(value: Array, operands: Mapping[str, Array], scalars: object, params: GivenParams) -> Array:
    import numpy as np

    return np.maximum(value, 0.0)


def _leaky_relu(value: Array, operands: Mapping[str, Array], scalars: Mapping[str, float], params: GivenParams) -> Array:
    import numpy as np

    return np.where(value < 0, value * scalars["leaky_relu_slope"], value)


def _activation(name: str, doc: str) -> StageKind:
    """A smooth function of expressions, by name. Its slope is below 1.2, and kernels may approximate it: hence the bound."""
    return StageKind(
        name,
        doc,
        lambda value, operands, scalars, params: FUNCTIONS[name].apply(value),
        magnitude=lambda bound, operands, scalars, params: 4.0 * bound,
        takes=("float",),
        repeatable=True,
    )


_KINDS = (
    StageKind(
        "bias",
        "adds bias[channel]",
        lambda value, operands, scalars, params: value + operands["bias"],
        operands=(Operand("bias", "K", role="addend", constant=True),),
        magnitude=lambda bound, operands, scalars, params: bound + abs(operands["bias"]),
    ),
    StageKind(
        "scale_shift",
        "multiplies by scale[channel], then adds shift[channel]",
        lambda value, operands, scalars, params: value * operands["scale"] + operands["shift"],
        operands=(
            Operand("scale", "K", role="scale", constant=True),
            Operand("shift", "K", role="addend", constant=True),
        ),
        magnitude=lambda bound, operands, scalars, params: bound * abs(operands["scale"]) + abs(operands["shift"]),
        takes=("float",),
    ),
    StageKind(
        "residual",
        "adds an array like the output, which may be the output's own memory",
        lambda value, operands, scalars, params: value + operands["residual"],
        operands=(Operand("residual", "y", "output", role="addend", aliases=True),),
        magnitude=lambda bound, operands, scalars, params: bound + abs(operands["residual"]),
    ),
    StageKind("relu", "max(value, 0)", _relu, repeatable=True),
    StageKind(
        "leaky_relu",
        "multiplies negative values by leaky_relu_slope, given at call time",
        _leaky_relu,
        scalars=(ScalarSpec("leaky_relu_slope", 0.01),),
        magnitude=lambda bound, operands, scalars, params: bound * max(1.0, abs(scalars["leaky_relu_slope"])),
        check=lambda spread: {"leaky_relu_slope": 0.25},
        takes=("float",),
    ),
    StageKind(
        "clip",
        "limits the value to clip_min ... clip_max, given at call time",
        _clip,
        scalars=(ScalarSpec("clip_min", 0.0), ScalarSpec("clip_max", 6.0)),
        check=_clip_bounds,
    ),
    _activation("sigmoid", "1 / (1 + exp(-value))"),
    _activation("silu", "value * sigmoid(value), also known as swish"),
    _activation("hard_swish", "value * clip(value / 6 + 1/2, 0, 1)"),
    _activation("gelu", "value * (1 + erf(value / sqrt(2))) / 2"),
    StageKind(
        "requantise",
        "makes 8-bit numbers of 32-bit sums: round(float32(sum) * requantise_scale[channel]) + y_zero_point, given at call "
        "time, saturated; the product is rounded to float32, then to an integer, both half to even",
        _requantise,
        operands=(Operand("requantise_scale", "K", "float32", role="scale", constant=True, positive=True),),
        scalars=(ScalarSpec("y_zero_point", 0.0, "to"),),
        parameters={"to": Parameter.choice("int8 or uint8; default int8", ("int8", "uint8"))},
        output=_to,
        check=lambda spread: {"y_zero_point": 7.0},
        check_inputs=_requantise_scales,
        takes=("int", "uint"),
    ),
    StageKind(
        "requantise_add",
        "requantises 32-bit sums to the format `middle` as requantise does, and adds a residual of 8 bits: both are "
        "dequantised, (q - zero_point) * scale, and their sum is quantised by y_scale and y_zero_point as quantise does; "
        "each product, sum and quotient is rounded to float32; zero points, and all scales but requantise_scale, are given "
        "at call time",
        _requantise_add,
        operands=(
            Operand("requantise_scale", "K", "float32", role="scale", constant=True, positive=True),
            Operand("residual", "y", "residual", role="addend", aliases=True),
        ),
        scalars=(
            ScalarSpec("middle_scale", 1.0, positive=True),
            ScalarSpec("middle_zero_point", 0.0, "middle"),
            ScalarSpec("residual_scale", 1.0, positive=True),
            ScalarSpec("residual_zero_point", 0.0, "residual"),
            ScalarSpec("y_scale", 1.0, positive=True),
            ScalarSpec("y_zero_point", 0.0, "to"),
        ),
        parameters={
            "to": Parameter.choice("of y: int8 or uint8; default int8", ("int8", "uint8")),
            "middle": Parameter.choice("of the sums before the addition: int8 or uint8; default int8", ("int8", "uint8")),
            "residual": Parameter.choice("of the residual: int8 or uint8; default int8", ("int8", "uint8")),
            "relu": Parameter("negative sums become 0 before they are quantised; default false",
                              {"type": "boolean", "default": False}),
        },
        output=_to,
        check=lambda spread: _ADDITION,
        check_inputs=_requantise_scales,
        takes=("int", "uint"),
    ),
    StageKind(
        "dequantise",
        "makes floating-point numbers of 32-bit sums (int32, or float32 of float8): multiplies by dequantise_scale[channel]",
        _dequantise,
        operands=(Operand("dequantise_scale", "K", "float32", role="scale", constant=True, positive=True),),
        parameters={
            "to": Parameter.choice("float32, float16 or bfloat16; default float32", ("float32", "float16", "bfloat16"))
        },
        output=_to,
        magnitude=lambda bound, operands, scalars, params: bound * abs(operands["dequantise_scale"]),
        takes=("int", "uint"),
        takes_float8_sums=True,
    ),
    StageKind(
        "quantise",
        "makes 8-bit numbers of dequantised ones: round(value / quantise_scale[channel]) + y_zero_point, given at call "
        "time, saturated; the quotient is rounded to float32, then to an integer, both half to even",
        _quantise,
        operands=(Operand("quantise_scale", "K", "float32", role="scale", constant=True, positive=True),),
        scalars=(ScalarSpec("y_zero_point", 0.0, "to"),),
        parameters={"to": Parameter.choice("int8 or uint8; default int8", ("int8", "uint8"))},
        output=_to,
        magnitude=lambda bound, operands, scalars, params: bound / abs(operands["quantise_scale"]),
        check=lambda spread: {"y_zero_point": 7.0},
        check_inputs=_quantise_scales,
        takes=("float",),
    ),
    StageKind(
        "depth_to_space",
        "stores groups of channels as blocks of block x block pixels; the last stage",
        lambda value, operands, scalars, params: value,
        parameters={
            "block": Parameter(
                "pixels along each axis of the image that a pixel becomes; its square divides the output channels",
                {"type": "integer", "minimum": 1, "maximum": MAX_BLOCK},
            ),
            "mode": Parameter.choice(
                "order of the output channels: DCR (pixel of the block, then channel) or CRD (channel, then pixel, as in "
                "torch.nn.PixelShuffle); default DCR",
                MODES,
            ),
        },
        output=lambda output, params: shuffled(output, params["block"]),
        moves=True,
    ),
)  # fmt: skip

STAGES: Mapping[str, StageKind] = MappingProxyType({kind.name: kind for kind in _KINDS})


def stage_kind(name: str) -> StageKind:
    """The entry of `STAGES`. Raises KeyError for a name that is not one of its keys."""
    return STAGES[name]


def stage_names(moves: bool) -> list[str]:
    """The stages that compute, and with `moves` those that only move elements."""
    return [name for name, kind in STAGES.items() if moves or not kind.moves]
