#!/bin/sh
# ptxas and nvdisasm 13.5.37, sm_90a, -O3
# A kernel that may begin while the one in front still runs (programmatic dependent launch) can load its constants before
# griddepcontrol.wait. ptxas keeps that order for ld.global, and moves the wait (ACQBULK) in front of the load for ld.global.nc, which
# is what const __restrict__ and __ldg give in CUDA C++. So weights that are loaded early in the source are loaded late, silently.
# Seen on 2026-11-29:
#     ld.global: LDG.E, ACQBULK, LDG.E, STG.E
#     ld.global.nc: ACQBULK, LDG.E.CONSTANT, LDG.E, STG.E
# Exits 0 while ptxas behaves like that.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-deps nvidia-cuda-nvcc==13.5.37 nvidia-cuda-nvdisasm==13.5.37
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import re
import subprocess
import sys
from pathlib import Path

folder = Path(sys.argv[1])
(ptxas,), (nvdisasm,) = (folder.glob(f"venv/lib/python*/site-packages/nvidia/cu13/bin/{name}") for name in ("ptxas", "nvdisasm"))
PTX = """.version 8.5
.target sm_90a
.address_size 64
.visible .entry scaled(.param .u64 weight, .param .u64 x, .param .u64 y) {{
.reg .b64 %a<4>;
.reg .f32 %f<4>;
ld.param.u64 %a1, [weight];
ld.param.u64 %a2, [x];
ld.param.u64 %a3, [y];
{load}.f32 %f1, [%a1];
griddepcontrol.wait;
ld.global.f32 %f2, [%a2];
mul.f32 %f3, %f1, %f2;
st.global.f32 [%a3], %f3;
ret;
}}
"""
found = []
for load in ("ld.global", "ld.global.nc"):
    source, cubin = folder / "scaled.ptx", folder / "scaled.cubin"
    source.write_text(PTX.format(load=load))
    subprocess.run([ptxas, "-arch=sm_90a", "-O3", source, "-o", cubin], check=True)
    code = subprocess.run([nvdisasm, cubin], check=True, capture_output=True, text=True).stdout
    found.append(re.findall(r"\b(LDG[.A-Z]*|ACQBULK|STG[.A-Z]*)\b", code))
    print(f"{load}:", ", ".join(found[-1]))
plain, constant = found
sys.exit(not (plain[:2] == ["LDG.E", "ACQBULK"] and constant[:2] == ["ACQBULK", "LDG.E.CONSTANT"]))
PYTHON
