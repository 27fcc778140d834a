"""The operator of kernels that another tuner measured: known by name only, so that their records can be kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schedsearch.errors import Problem, WorkloadError, did_you_mean
from schedsearch.ops.base import ArgSpec, ScalarSpec

_PARAMETERS = {
    "tuner": "who measured it, e.g. kernel-tuner",
    "kernel": "the kernel's name there",
    "problem": "the problem's size or arguments, as text",
}


class Foreign:
    """Has no arguments, no output and no work that are known here: no template runs it, and no workload file names it."""

    name = "foreign"
    version = 1

    def parameters(self) -> Mapping[str, str]:
        return _PARAMETERS

    def defaults(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return {"problem": ""}

    def normalise(self, params: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
        problems = [
            Problem(key, f"foreign has no parameter {key!r}{did_you_mean(str(key), _PARAMETERS)}; "
                         f"allowed: {', '.join(_PARAMETERS)}")
            for key in params
            if key not in _PARAMETERS
        ]  # fmt: skip
        out = {**self.defaults(params), **{key: params[key] for key in _PARAMETERS if key in params}}
        for key, meaning in _PARAMETERS.items():
            if not isinstance(out.get(key), str):
                problems.append(Problem(key, f"{key} ({meaning}) must be a text, got {out.get(key)!r}"))
        return out, problems

    def arguments(self, params: Mapping[str, Any]) -> tuple[ArgSpec, ...]:
        return ()

    def output(self, params: Mapping[str, Any]) -> ArgSpec:
        raise WorkloadError(
            f"what {self.label(params)} computes is not known here; its records can be read and replayed only"
        )

    def scalars(self, params: Mapping[str, Any]) -> tuple[ScalarSpec, ...]:
        return ()

    def flops(self, params: Mapping[str, Any]) -> int:
        return 0

    def label(self, params: Mapping[str, Any]) -> str:
        return " ".join(text for text in (params["tuner"], params["kernel"], params["problem"][:40]) if text)


FOREIGN = Foreign()
