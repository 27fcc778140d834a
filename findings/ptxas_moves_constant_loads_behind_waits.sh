#!/bin/sh
# ptxas and nvdisasm 13.5.37, sm_90a, -O3
# A load that stands in front of a wait, so that both take their time at once, stays there with ld.global. With ld.global.nc, which is what
# const __restrict__ and __ldg give in CUDA C++, ptxas moves it behind the wait, silently: behind bar.sync (a tile that is loaded to
# registers early), and behind griddepcontrol.wait (ACQBULK: the constants of a kernel that begins while the one in front still runs).
# Behind the wait for an mbarrier it does not move these.
# Seen on 2026-11-29:
#     bar.sync 0, ld.global: LDG.E, BAR.SYNC.DEFER_BLOCKING, LDG.E, STG.E
#     bar.sync 0, ld.global.nc: BAR.SYNC.DEFER_BLOCKING, LDG.E.CONSTANT, LDG.E, STG.E
#     griddepcontrol.wait, ld.global: LDG.E, ACQBULK, LDG.E, STG.E
#     griddepcontrol.wait, ld.global.nc: ACQBULK, LDG.E.CONSTANT, LDG.E, STG.E
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
{wait};
ld.global.f32 %f2, [%a2];
mul.f32 %f3, %f1, %f2;
st.global.f32 [%a3], %f3;
ret;
}}
"""
found = []
for wait in ("bar.sync 0", "griddepcontrol.wait"):
    for load in ("ld.global", "ld.global.nc"):
        source, cubin = folder / "scaled.ptx", folder / "scaled.cubin"
        source.write_text(PTX.format(load=load, wait=wait))
        subprocess.run([ptxas, "-arch=sm_90a", "-O3", source, "-o", cubin], check=True)
        code = subprocess.run([nvdisasm, cubin], check=True, capture_output=True, text=True).stdout
        order = re.findall(r"\b(LDG[.A-Z]*|ACQBULK|BAR[._A-Z]*|STG[.A-Z]*)(?![._A-Z])", code)
        print(f"{wait}, {load}:", ", ".join(order))
        found.append([each.split(".")[0] for each in order[:2]])
sys.exit(found != [["LDG", "BAR"], ["BAR", "LDG"], ["LDG", "ACQBULK"], ["ACQBULK", "LDG"]])
PYTHON
