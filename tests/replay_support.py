"""Tiny recorded spaces in the formats of other tuners, written from the formats' descriptions, not with our own writers."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

PARAMS = {"bx": [16, 32, 64, 128], "unroll": [1, 2, 4], "order": ["row", "column"], "fixed": [7]}
FAILED = {(128, 4): "RuntimeFailedConfig", (128, 2): "CompilationFailedConfig"}  # by (bx, unroll)


def time_ms(bx: int, unroll: int, order: str) -> float:
    """The true times of the synthetic kernel: (32, 4, row) is the fastest with 1 ms."""
    return 1.0 + abs(bx - 32) / 16 + (4 - unroll) / 2 + (0.75 if order == "column" else 0.0)


def allowed(bx: int, unroll: int) -> bool:
    return bx * unroll != 16 * 4


def cache(params: dict[str, list[Any]] = PARAMS) -> dict[str, Any]:
    """A Kernel Tuner cache of every allowed configuration: 18 of 24 points, 4 of which failed."""
    entries = {}
    for bx, unroll, order, fixed in itertools.product(*params.values()):
        if not allowed(bx, unroll):
            continue
        fields = {"bx": bx, "unroll": unroll, "order": order, "fixed": fixed, "compile_time": 250.0, "GFLOP/s": 17.0}
        error = FAILED.get((bx, unroll))
        time = time_ms(bx, unroll, order)
        fields |= {"time": error} if error else {"time": time, "times": [time * 0.99, time, time * 1.01]}
        entries[f"{bx},{unroll},{order},{fixed}"] = fields
    return {
        "device_name": "Some GPU",
        "kernel_name": "some_kernel",
        "problem_size": [4096, 4096],
        "tune_params_keys": list(params),
        "tune_params": params,
        "objective": "time",
        "cache": entries,
    }


def t1(*conditions: str, params: dict[str, list[Any]] = PARAMS) -> dict[str, Any]:
    parameters = [{"Name": name, "Type": "int", "Values": str(values)} for name, values in params.items()]
    listed = [{"Expression": text, "Parameters": list(params)} for text in conditions]
    return {"ConfigurationSpace": {"TuningParameters": parameters, "Conditions": listed}}


def t4(data: dict[str, Any], unit: str = "miliseconds", per_ms: float = 1.0) -> dict[str, Any]:
    """The data of a cache as T4 results."""
    words = {"RuntimeFailedConfig": "runtime", "CompilationFailedConfig": "compile"}
    results = []
    for fields in data["cache"].values():
        failed = isinstance(fields["time"], str)
        results.append(
            {
                "configuration": {name: fields[name] for name in data["tune_params"]},
                "times": {
                    "compilation": fields["compile_time"] * per_ms,
                    "runtimes": [time * per_ms for time in fields.get("times", [])],
                },
                "invalidity": words[fields["time"]] if failed else "correct",
                "correctness": int(not failed),
                "measurements": [] if failed else [{"name": "time", "value": fields["time"] * per_ms, "unit": ""}],
                "objectives": ["time"],
            }
        )
    return {"results": results, "schema_version": "1.0.0", "metadata": {"timeunit": unit}}


def write(path: Path, data: Any) -> Path:
    text = data if isinstance(data, str) else json.dumps(data)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path
