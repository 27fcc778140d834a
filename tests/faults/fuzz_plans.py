"""Fuzzes launch plans: a changed plan is refused, or is sound and fits the workload that it is launched for.

The seeds are the plans of the kernels of the sample database and of a GPU kernel with tensor maps. What a plan must be is
checked here again, from the definitions of CUDA and of the workload, without the code under test.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from store_contract import artifact, conv

from schedsearch.errors import PlanError
from schedsearch.launch import Artifact, LaunchPlan
from schedsearch.records.store import Store
from schedsearch.workload import Workload

from . import fuzzing, json_mutations, sample_database
from .commands import check_error
from .fuzzing import Broken, Result

NAME = "plans"
_ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int8": 1}


class Plans:
    """See `fuzzing.Fuzzer`."""

    def __init__(self, samples: sample_database.Samples | None = None) -> None:
        samples = samples or sample_database.make()
        self._seeds: list[tuple[dict[str, Any], Workload]] = [(json.loads(artifact().plan.to_json()), conv())]
        with sample_database.opened(samples) as store:
            for workload in sample_database.SERVED:
                for sha256 in samples.code_of[workload.id]:
                    self._seeds.append((_plan(store, sha256), workload))

    def case(self, random: random.Random, folder: Path) -> str:
        seed, workload = random.choice(self._seeds)
        text = json_mutations.mutated(seed, random)
        try:
            plan = LaunchPlan.from_json(text)
            again = LaunchPlan.from_json(plan.to_json())
            if again != plan or Artifact(b"x", again).sha256 != Artifact(b"x", plan).sha256:
                raise Broken(f"the plan is another one when it is read again: {text:.1000}")
            _check_sound(plan)
            other = random.choice(self._seeds)[1] if random.random() < 0.2 else workload
            plan.check(other)
        except PlanError as error:
            check_error(error, (), "the plan")
            return "refused"
        _check_fits(plan, other)
        return "as before" if json.loads(plan.to_json()) == seed else "sound"


def _plan(store: Store, sha256: str) -> dict[str, Any]:
    stored = store.artifact(sha256)
    assert stored is not None
    made: dict[str, Any] = json.loads(stored.plan.to_json())
    return made


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise Broken(f"a plan was accepted with {what}")


def _check_sound(plan: LaunchPlan) -> None:
    """A plan by itself: integers within the limits of CUDA and of 64-bit arithmetic."""
    _require(plan.kind in ("cuda", "cpu"), f"kind {plan.kind!r}")
    _require(len(plan.steps) > 0, "no steps")
    for name, size in (*plan.workspaces.items(), *plan.alignments.items()):
        _require(type(name) is str and type(size) is int and size > 0, f"size {size!r} of {name!r}")
    _require(all(size & (size - 1) == 0 for size in plan.alignments.values()), "an alignment that is no power of two")
    for step in plan.steps:
        _require(type(step.block_threads) is int and 1 <= step.block_threads <= 1024, f"{step.block_threads!r} threads")
        shared = step.dynamic_shared_bytes
        _require(type(shared) is int and 0 <= shared <= 227 * 1024, f"{shared!r} bytes of shared memory")
        _require(type(step.cluster) is int and 1 <= step.cluster <= 16, f"a cluster of {step.cluster!r}")
        _require(type(step.grid.work_items) is int and step.grid.work_items > 0, f"{step.grid.work_items!r} work items")
        _require(type(step.constant) is bool, f"constant {step.constant!r}")
        if plan.kind == "cuda":
            _require(1 <= step.grid.blocks(132, step.cluster) < 2**31, "a grid that is too large")
        for param in step.params:
            value = getattr(param, "value", 0)
            _require(type(value) in (int, float) and value == value and abs(value) < 2**128, f"the value {value!r}")
            if param.kind in ("i32", "i64"):
                bits = int(param.kind[1:])
                _require(type(value) is int and -(2 ** (bits - 1)) <= value < 2 ** (bits - 1), f"the value {value!r}")


def _check_fits(plan: LaunchPlan, workload: Workload) -> None:
    """A plan for a workload: every buffer is an argument, an output or a workspace, and tensor maps stay inside of it."""
    nbytes = {spec.name: spec.nbytes for spec in (*workload.signature, *workload.outputs)}
    _require(not nbytes.keys() & plan.workspaces.keys(), "a workspace that hides an argument")
    nbytes |= plan.workspaces
    scalars = {scalar.name for scalar in workload.scalars}
    for step in plan.steps:
        for param in step.params:
            if param.kind == "scalar":
                _require(param.name in scalars, f"the scalar {param.name!r}")
            elif param.kind == "pointer":
                _require(param.optional or param.buffer in nbytes, f"the buffer {param.buffer!r}")
            elif param.kind == "tensor_map":
                _require(param.buffer in nbytes, f"the buffer {param.buffer!r}")
                item = _ITEM_BYTES.get(param.dtype, 1)
                strides = (item, *param.strides_bytes)
                last = sum((extent - 1) * stride for extent, stride in zip(param.dims, strides, strict=True)) + item
                _require(last <= nbytes[param.buffer], f"a tensor map of {last} bytes over {nbytes[param.buffer]}")
                _require(all(extent > 0 for extent in param.dims), f"a tensor map of {param.dims}")


def run(seed: int, count: int, folder: Path, deadline_s: float | None = None, first: int = 0, **options: Any) -> Result:
    """See `fuzzing.run`."""
    return fuzzing.run(NAME, Plans(), seed, count, folder, deadline_s, first=first, **options)
