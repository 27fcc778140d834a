"""The operator of kernels that another tuner measured. Only their names are known, which suffices to store their records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from schedsearch.errors import Problem, WorkloadError
from schedsearch.ops.base import ArgSpec, Op, Parameter, Work, unknown_parameters

_PARAMETERS = {
    "tuner": Parameter("who measured it, e.g. kernel-tuner", {"type": "string"}),
    "kernel": Parameter("the kernel's name there", {"type": "string"}),
    "problem": Parameter("the problem's size or arguments, as text", {"type": "string", "default": ""}),
}


class Foreign(Op):
    """Its arguments, outputs and work are unknown. No template runs it, and no workload file may name it."""

    name: ClassVar[str] = "foreign"
    reference: ClassVar[str] = ""

    def parameters(self) -> Mapping[str, Parameter]:
        return _PARAMETERS

    def normalise(self, params: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
        problems = unknown_parameters(self.name, params, _PARAMETERS)
        out = {**self.defaults(params), **{key: params[key] for key in _PARAMETERS if key in params}}
        for key, parameter in _PARAMETERS.items():
            if not isinstance(out.get(key), str):
                problems.append(Problem(key, f"{key} ({parameter.doc}) must be a string, got {out.get(key)!r}"))
        return out, problems

    def arguments(self, params: Mapping[str, Any]) -> tuple[ArgSpec, ...]:
        return ()

    def outputs(self, params: Mapping[str, Any]) -> tuple[ArgSpec, ...]:
        raise WorkloadError(
            f"schedsearch does not know what {self.label(params)} computes; its records can only be read and replayed"
        )

    def work(self, params: Mapping[str, Any]) -> Work:
        return Work(0, 0)

    def label(self, params: Mapping[str, Any]) -> str:
        return " ".join(text for text in (params["tuner"], params["kernel"], params["problem"][:40]) if text)


FOREIGN = Foreign()
