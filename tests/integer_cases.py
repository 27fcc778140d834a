"""The recorded cases of int8 and uint8 convolutions, as workloads in their own layout and in NHWC."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from test_operator_cases_gpu import both, padding

from schedsearch.constructors.convolutions import conv2d
from schedsearch.workload import Workload

FAMILIES = {  # name in the file -> number of cases; those of 4-bit numbers are not ours
    "conv2d_NCHWc_int8": 78,
    "conv2d_nchw_int8": 9,
    "group_conv2d_NCHWc_int8": 7,
    "group_conv2d_nchw_int8": 7,
    "conv2d_HWNCnc_tensorcore": 1,
    "conv2d_NHWC_gemm_int8 (cpu test, shapes only)": 17,
}


def cases(shared: Path, family: str) -> list[dict[str, Any]]:
    found = json.loads((shared / "cases" / "operator_cases.json").read_text())["cases"][family]
    return [case for case in found if _dtype(case) in ("int8", "uint8")]


def workload_of(case: dict[str, Any], layout: str | None = None) -> Workload:
    """The case in `layout`; default: its own, with NHWC in the place of HWNC, which we do not have."""
    kernel, dilation = both(case["kernel"]), both(case["dilation"])
    height, width = both(case["in_size"])
    own = case["layout"]
    return conv2d(
        n=case["batch"], h=height, w=width, c=case["in_channel"], k=case["num_filter"], r=kernel[0], s=kernel[1],
        stride=both(case["stride"]), padding=padding(case, kernel, dilation), dilation=dilation,
        groups=case.get("groups", 1), dtype=_dtype(case), layout=layout or ("NHWC" if own.startswith("HWNC") else own),
        epilogue=[name for name in ("bias", "relu") if case.get(f"add_{name}")],
    )  # fmt: skip


def _dtype(case: dict[str, Any]) -> str:
    return str(case.get("in_dtype") or case["dtype"])
