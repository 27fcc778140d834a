"""Epilogue stages: what an operator does with its accumulated value before it is cast and stored.

A stage is an entry of `STAGES`: its operands, call-time scalars, parameters, and its definition in NumPy. An operator with
an epilogue gets arguments, scalars and outputs from the list of its stages; references compute with `apply`.
To add a stage, add an entry here and its device code in `templates/parts/stages.py`. Templates refuse stages without code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from schedsearch.errors import Problem, did_you_mean
from schedsearch.ops.base import (
    ArgSpec,
    Parameter,
    Role,
    ScalarSpec,
    frozen,
    judge,
    missing_parameters,
    plain,
    schema_defaults,
    unknown_parameters,
)
from schedsearch.ops.checks import Domain
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.pixel_shuffle import MAX_BLOCK, MODES, PixelShuffle, shuffle_problem, shuffled

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

# (value, operands by name, scalars by name, the stage's parameters) -> value; float64 arrays of one shape.
Apply = Callable[["Array", Mapping[str, Any], Mapping[str, float], Mapping[str, Any]], "Array"]


@dataclass(frozen=True)
class Operand:
    """An array argument that a stage adds to its operator.

    Attributes:
        axes: K: one element for each output channel; y: like the output at that stage.
        dtype: "vector": the format of per-channel numbers, which is that of the operator's input if it is a float of
            at least two bytes, float32 if it is float8, else the value's 32 bits before `dequantise` and float32 behind it;
            "output": that of the output at that stage; or a concrete one.
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


def _same_output(output: ArgSpec, params: Mapping[str, Any]) -> ArgSpec:
    return output


def _same_bound(bound: Any, operands: Mapping[str, Any], scalars: Mapping[str, float], params: Mapping[str, Any]) -> Any:
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
    output: Callable[[ArgSpec, Mapping[str, Any]], ArgSpec] = _same_output
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

    def defaults(self) -> dict[str, Any]:
        """The values of the optional parameters."""
        return schema_defaults(self.parameters)

    def schema(self) -> dict[str, Any]:
        """JSON Schema of the stage in a workload file: a word, or {name: {parameter: value}}."""
        if not self.parameters:
            return {"const": self.name}
        properties = {name: {**each.schema, "description": each.doc} for name, each in self.parameters.items()}
        required = [name for name in self.parameters if name not in self.defaults()]
        inner: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
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
    params: Mapping[str, Any]

    def __init__(self, name: str, params: Mapping[str, Any] = MappingProxyType({})) -> None:
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

    def __setattr__(self, name: str, value: Any) -> None:
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

    def __reduce__(self) -> tuple[Any, ...]:
        return Stage, (self.name, dict(self.params))


def _clip_bounds(spread: float) -> dict[str, float]:
    low = -max(1.0, float(round(spread)))
    return {"clip_min": low, "clip_max": -2.0 * low + 1.0}


def _clip(value: Any, operands: Any, scalars: Mapping[str, float], params: Any) -> Any:
    import numpy as np

    return np.minimum(np.maximum(value, scalars["clip_min"]), scalars["clip_max"])


def _requantise(value: Any, operands: Mapping[str, Any], scalars: Mapping[str, float], params: Mapping[str, Any]) -> Any:
    import numpy as np

    row = dtype_of(params["to"])
    scaled = np.float32(value) * np.float32(operands["requantise_scale"])  # one rounding to float32 each
    return np.clip(np.rint(scaled).astype(np.float64) + scalars["y_zero_point"], row.lowest, row.largest)


def _quantise(value: Any, operands: Mapping[str, Any], scalars: Mapping[str, float], params: Mapping[str, Any]) -> Any:
    import numpy as np

    row = dtype_of(params["to"])
    return np.clip(value / operands["quantise_scale"] + scalars["y_zero_point"], row.lowest, row.largest)


def _dequantise(value: Any, operands: Mapping[str, Any], scalars: Any, params: Any) -> Any:
    return value * operands["dequantise_scale"]


def _to(output: ArgSpec, params: Mapping[str, Any]) -> ArgSpec:
    return replace(output, dtype=params["to"])


def _requantise_scales(spread: float) -> dict[str, Domain]:
    """Scales that bring the sums to the range of 8 bits, so that some saturate. They are powers of two, times 3 for some:
    many products then lie exactly between two whole numbers."""
    unit = 2.0 ** round(math.log2(32.0 / max(spread, 1.0)))
    return {"requantise_scale": Domain((unit / 2, unit, 3 * unit / 4, 2 * unit))}


def _quantise_scales(spread: float) -> dict[str, Domain]:
    """Scales that bring numbers as large as the sums to the range of 8 bits; powers of two, times 3 for some."""
    unit = 2.0 ** round(math.log2(max(spread, 1.0) / 32.0))
    return {"quantise_scale": Domain((unit / 2, unit, 3 * unit / 2, 2 * unit))}


def _relu(value: Any, operands: Any, scalars: Any, params: Any) -> Any:
    import numpy as np

    return np.maximum(value, 0.0)


def _leaky_relu(value: Any, operands: Any, scalars: Mapping[str, float], params: Any) -> Any:
    import numpy as np

    return np.where(value < 0, value * scalars["leaky_relu_slope"], value)


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
    StageKind(
        "requantise",
        "makes 8-bit numbers of 32-bit sums: round(float32(sum) * requantise_scale[channel]) + y_zero_point, given at call "
        "time, saturated; the product is rounded to float32, then to a whole number, both half to even",
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
        "time, saturated; the quotient is rounded to float32, then to a whole number, both half to even",
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


# ---- for operators that take an epilogue

MAX_STAGES = 64  # each is compiled into the kernel


def _stage_names(moves: bool) -> list[str]:
    """The stages that compute, and with `moves` those that only move elements."""
    return [name for name, kind in STAGES.items() if moves or not kind.moves]


def epilogue_parameter(stages: Sequence[str] | None = None, *, moves: bool = False) -> Parameter:
    """The parameter `epilogue` of an operator that takes these stages; default: all, with `moves` also `depth_to_space`."""
    names = _stage_names(moves) if stages is None else list(stages)
    words = [name for name in names if not STAGES[name].parameters]
    items: dict[str, Any] = {"enum": words}
    if len(words) < len(names):
        items = {"anyOf": [items, *(STAGES[name].schema() for name in names if name not in words)]}
    repeat = ", ".join(name for name in names if STAGES[name].repeatable)
    doc = f"stages applied in order, each at most once except {repeat}: {', '.join(names)}; default none"
    if not repeat:
        doc = doc.replace(" except ", "")
    return Parameter(doc, {"type": "array", "items": items, "default": []})


def parse_epilogue(
    value: Any, allowed: Sequence[str] | None = None, *, moves: bool = False
) -> tuple[tuple[Stage, ...], list[Problem]]:
    """Stages of the value of a parameter `epilogue`, and every mistake in it.

    Args:
        value: a list whose items are words, {name: {parameter: value}}, or `Stage`s.
        allowed: names that the operator takes; default: all stages.
        moves: by default also those that only move elements; such an operator asks `moving_problem`, too.
    """
    names = _stage_names(moves) if allowed is None else list(allowed)
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence):
        return (), [Problem("epilogue", f"epilogue must be a list of stages, got {value!r}; e.g. [bias, relu]")]
    if len(value) > MAX_STAGES:
        return (), [Problem("epilogue", f"epilogue has {len(value):,} stages; at most {MAX_STAGES} are possible")]
    stages: list[Stage] = []
    problems: list[Problem] = []
    seen: set[str] = set()
    for place, item in enumerate(value):
        stage, found = _parse_stage(item, names)
        problems += [replace(each, key="epilogue", path=(place, *each.path)) for each in found]
        if stage is None:
            continue
        stages.append(stage)
        if stage.name in seen and not stage.kind.repeatable:
            repeat = ", ".join(name for name in names if STAGES[name].repeatable)
            message = f"stage {stage.name!r} occurs more than once; only {repeat or 'none'} may"
            problems.append(Problem("epilogue", message, path=(place,)))
        seen.add(stage.name)
    return tuple(stages), problems


def _parse_stage(item: Any, names: Sequence[str]) -> tuple[Stage | None, list[Problem]]:
    """A stage, or the problems with it; their paths are relative to the item."""
    name: Any
    params: Any
    if isinstance(item, Stage):
        name, params = item.name, dict(item.params)
    elif isinstance(item, Mapping) and len(item) == 1:
        ((name, params),) = item.items()
    else:
        name, params = item, {}
    if name not in names:
        hint = did_you_mean(name, names) if isinstance(name, str) else ""
        return None, [Problem("", f"epilogue {name!r} is not possible{hint}; allowed: {', '.join(names)}")]
    if not isinstance(params, Mapping):
        known = ", ".join(STAGES[name].parameters)
        takes = f"a mapping of {known}" if known else "no parameters"
        return None, [Problem("", f"stage {name} takes {takes}, got {params!r}", path=(name,))]
    known_parameters = STAGES[name].parameters
    problems = [
        Problem("", problem.message, path=(name, problem.key), at_key=True)
        for problem in unknown_parameters(f"stage {name}", params, known_parameters)
    ]
    required = {key: known_parameters[key] for key in known_parameters if key not in STAGES[name].defaults()}
    problems += [
        Problem("", f"stage {name}: {problem.message}", path=(name,)) for problem in missing_parameters(params, required)
    ]
    values = {key: plain(params[key]) for key in params if key in known_parameters}
    for key, each in values.items():
        if complaint := judge(each, known_parameters[key].schema):
            problems.append(Problem("", f"{key} of stage {name} {complaint}", path=(name, key)))
    return (None if problems else Stage(name, values)), problems


def computing(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages without those that only move elements."""
    return tuple(stage for stage in stages if not stage.kind.moves)


def pixel_shuffle(stages: Sequence[Stage], channels: int) -> PixelShuffle | None:
    """The depth_to_space at the end of the stages, or None.

    Args:
        channels: extent of K.
    """
    last = stages[-1] if stages else None
    if last is None or not last.kind.moves:
        return None
    return PixelShuffle(channels, last.params["block"], last.params["mode"])


def moving_problem(stages: Sequence[Stage], value: ArgSpec) -> Problem | None:
    """A stage that moves elements where it cannot: before another one, or of an output that does not divide.

    Args:
        value: the output before the epilogue.
    """
    for place, stage in enumerate(stages):
        if not stage.kind.moves:
            continue
        if place + 1 < len(stages):
            after = ", ".join(str(each) for each in stages[place + 1 :])
            return Problem("epilogue", f"stage {stage.name} must be the last, got {after} after it", path=(place,))
        if problem := shuffle_problem(value, stage.params["block"]):
            return Problem("epilogue", f"stage {stage.name} {problem}", path=(place,))
    return None


def epilogue_arguments(
    stages: Sequence[Stage], accumulator: ArgSpec, channels: int, input_dtype: str
) -> tuple[ArgSpec, ...]:
    """The operands of all stages, in order.

    Args:
        accumulator: the output before the first stage, with the output's dtype.
        channels: extent of K.
        input_dtype: the dtype of the operator's input; see `Operand`.
    """
    float8 = dtype_of(input_dtype).is_float and dtype_of(input_dtype).nbytes == 1
    output, found, vector = accumulator, [], "float32" if float8 else input_dtype
    for stage in stages:
        kind = stage.kind
        output = kind.output(output, stage.params)
        if not dtype_of(input_dtype).is_float:
            vector = "float32" if dtype_of(output.dtype).is_float else output.dtype
        for operand in kind.operands:
            dtype = {"vector": vector, "output": output.dtype}.get(operand.dtype, operand.dtype)
            axes, shape = ("K", (channels,)) if operand.axes == "K" else (output.axes, output.shape)
            aliases = output.name if operand.aliases else None
            spec = ArgSpec(operand.name, axes, shape, dtype, operand.role, operand.constant, aliases)
            found.append(replace(spec, positive=operand.positive))
    return tuple(found)


def epilogue_output(stages: Sequence[Stage], accumulator: ArgSpec) -> ArgSpec:
    """The output after all stages."""
    output, floats = accumulator, 0
    for stage in stages:
        output = stage.kind.output(output, stage.params)
        if stage.kind.moves:
            continue
        floats += stage.name == "dequantise" or "int" not in stage.kind.takes or floats > 0
    # A stage of floats rounds twice at most (scale_shift), and dequantise once more, when it makes a float of a sum.
    computed = computing(stages)
    roundings = 2 * floats + 1 if computed and computed[-1].name == "quantise" else 0
    return replace(output, name=accumulator.name, roundings=roundings)


def epilogue_scalars(stages: Sequence[Stage]) -> tuple[ScalarSpec, ...]:
    """The call-time scalars of all stages, in order. `number` may be a parameter of the stage, whose value it then is."""
    return tuple(
        replace(scalar, number=stage.params.get(scalar.number, scalar.number))
        for stage in stages
        for scalar in stage.kind.scalars
    )


def epilogue_check_scalars(stages: Sequence[Stage], spread: float) -> dict[str, float]:
    """Values of the call-time scalars for verification; see `Op.check_scalars`."""
    values = {scalar.name: scalar.default for scalar in epilogue_scalars(stages)}
    for stage in stages:
        if stage.kind.check is not None:
            values |= stage.kind.check(spread)
    return values


def epilogue_check_inputs(stages: Sequence[Stage], spread: float) -> dict[str, Domain]:
    """What to draw for operands whose stage does not leave it to their role; see `Op.check_inputs`."""
    domains: dict[str, Domain] = {}
    for stage in stages:
        if stage.kind.check_inputs is not None:
            domains |= stage.kind.check_inputs(spread)
    return domains
