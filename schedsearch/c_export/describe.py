"""What an export says about a kernel: what it computes, on which card it was measured, and who vouches for it."""

from __future__ import annotations

import json
import math
import time

from schedsearch.c_export.chosen import Chosen
from schedsearch.c_export.plan_source import Memory
from schedsearch.ops import ArgSpec
from schedsearch.records import claims
from schedsearch.typed import JsonObject


def description(chosen: Chosen) -> JsonObject:
    """JSON values; the same database on the same machine gives the same ones."""
    workload, plan, row, memory = chosen.workload, chosen.plan, chosen.best.row, Memory.of(chosen.plan)

    def array(spec: ArgSpec) -> JsonObject:
        return {
            "name": spec.name,
            "dtype": spec.dtype,
            "axes": spec.axes,
            "shape": list(spec.shape),
            "bytes": spec.span_bytes,
            "alignment": plan.alignments.get(spec.name, 1),
            **({"slice_of": list(spec.slice_of)} if spec.slice_of else {}),
            **({"may_be": spec.aliases} if spec.aliases else {}),
            **({"extents": spec.extents} if spec.extents else {}),
            **({"repacked": True} if spec.name in plan.constants else {}),
        }

    return {
        "name": chosen.name,
        "label": workload.label,
        "workload_id": workload.id,
        "workload": json.loads(workload.json),
        "arguments": [array(spec) for spec in workload.signature],
        "outputs": [array(spec) for spec in workload.outputs],
        "scalars": [
            {
                "name": scalar.name,
                "dtype": scalar.dtype,
                "default": scalar.default if math.isfinite(scalar.default) else str(scalar.default),
            }
            | ({"whole_number_of": scalar.number} if scalar.number else {})
            for scalar in workload.scalars
        ],
        "workspace_bytes": memory.workspace_bytes,
        "prepared_bytes": memory.prepared_bytes,
        "prepared_workspace_bytes": memory.scratch_bytes,
        "workspace_alignment": memory.alignment,
        "launches": len(plan.steps),
        "arch": plan.arch,
        "code_bytes": len(chosen.artifact.code),
        "artifact": chosen.artifact.sha256,
        "template": row.template,
        "template_version": row.template_version,
        "config": dict(row.config),
        "measured": {
            "on": row.target,
            "time_ns": chosen.time_ns,
            "mode": row.measurement.mode,
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(row.finished_at)),
            "host": row.measurement.host,
            "device_uuid": row.measurement.device_uuid,
            "source": row.source or "this machine",
        },
        "verified": chosen.best.verified,
        "trust": _trust(chosen),
    }


def _trust(chosen: Chosen) -> str:
    best = chosen.best
    machine = claims.machine_id()
    if claims.is_ours(claims.Kind.BEST, best.claim.text, best.signature):
        return f"measured, verified and signed by machine {machine}"
    return f"marked as trusted by the user of machine {machine}"
