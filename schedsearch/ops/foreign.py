"""The operator of kernels that another tuner measured. Only their names are known, which suffices to store their records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from schedsearch.errors import Problem, WorkloadError
from schedsearch.ops.base import Op
from schedsearch.ops.params import Parameter, Params, declared, unknown_parameters
from schedsearch.ops.specs import ArgSpec, Work
from schedsearch.typed import ParamsByName


@dataclass(frozen=True, eq=False, kw_only=True)
class ForeignParams(Params):
    """See `foreign`."""

    tuner: str = declared(Parameter("who measured it, e.g. kernel-tuner", {"type": "string"}))
    kernel: str = declared(Parameter("the kernel's name there", {"type": "string"}))
    problem: str = declared(Parameter("the problem's size or arguments, as text", {"type": "string", "default": ""}))


_PARAMETERS = ForeignParams.parameters()


class Foreign(Op[ForeignParams]):
    """Its arguments, outputs and work are unknown. No template runs it, and no workload file may name it."""

    params_type: ClassVar[type[Params]] = ForeignParams
    name: ClassVar[str] = "foreign"
    reference: ClassVar[str] = ""

    def normalise(self, params: Mapping[str, object]) -> tuple[ParamsByName, list[Problem]]:
        problems = unknown_parameters(self.name, params, _PARAMETERS)
        out = {**self.defaults(params), **{key: params[key] for key in _PARAMETERS if key in params}}
        for key, parameter in _PARAMETERS.items():
            if not isinstance(out.get(key), str):
                problems.append(Problem(key, f"{key} ({parameter.doc}) must be a string, got {out.get(key)!r}"))
        return out, problems

    def arguments(self, params: ForeignParams) -> tuple[ArgSpec, ...]:
        return ()

    def outputs(self, params: ForeignParams) -> tuple[ArgSpec, ...]:
        raise WorkloadError(
            f"schedsearch does not know what {self.label(params)} computes; its records can only be read and replayed"
        )

    def work(self, params: ForeignParams) -> Work:
        return Work(0, 0)

    def label(self, params: ForeignParams) -> str:
        return " ".join(text for text in (params.tuner, params.kernel, params.problem[:40]) if text)


FOREIGN = Foreign()
