#!/bin/sh
# ptxas and nvdisasm 13.5.37, sm_90a, -O3
# A warp reads a buffer by ldmatrix, multiplies, and then arrives at the mbarrier for which TMA waits before it fills the buffer again. ptxas
# puts the arrival right behind the last ldmatrix, in front of the product, and lets it wait for none of the scoreboards that ldmatrix sets:
# their order is enough between threads, but TMA writes in another proxy. fence.proxy.async in front of the arrival, which the PTX ISA asks
# for there, becomes MEMBAR and FENCE.VIEW.ASYNC between the two. A kernel of that form without the fence gave wrong sums in 1,194 of 1,698
# launches on an H200, with stores to memory in front of ldmatrix and two blocks on a multiprocessor; none in 1,873 launches where no stores
# stood in front. (That part needs a card and is not run here.)
# Seen on 2026-11-29:
#     without a fence: LDSM, LDSM, SYNCS.ARRIVE (does not wait for LDSM), HMMA (waits for LDSM)
#     fence.proxy.async: LDSM, LDSM, MEMBAR, FENCE.VIEW.ASYNC, SYNCS.ARRIVE (does not wait for LDSM), HMMA (waits for LDSM)
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
.extern .shared .align 128 .b8 buffer[];
.visible .entry products(.param .u64 y, .param .u32 at, .param .u32 empty) {{
.reg .b64 %a<2>;
.reg .b32 %r<12>;
.reg .f32 %f<4>;
.reg .pred %first;
ld.param.u64 %a1, [y];
ld.param.u32 %r8, [at];
ld.param.u32 %r9, [empty];
mov.u32 %r10, %tid.x;
setp.eq.u32 %first, %r10, 0;
mad.lo.u32 %r11, %r10, 16, %r8;
mov.f32 %f0, 0f00000000;
mov.f32 %f1, 0f00000000;
mov.f32 %f2, 0f00000000;
mov.f32 %f3, 0f00000000;
ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r0, %r1, %r2, %r3}}, [%r11];
ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r4, %r5, %r6, %r7}}, [%r11 + 512];
mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{%f0, %f1, %f2, %f3}}, {{%r0, %r1, %r2, %r3}}, {{%r4, %r5}}, {{%f0, %f1, %f2, %f3}};
{fence}
@%first mbarrier.arrive.shared::cta.b64 _, [%r9];
st.global.v4.f32 [%a1], {{%f0, %f1, %f2, %f3}};
ret;
}}
"""
found = []
for name, fence in (("without a fence", ""), ("fence.proxy.async", "fence.proxy.async.shared::cta;")):
    source, cubin = folder / "products.ptx", folder / "products.cubin"
    source.write_text(PTX.format(fence=fence))
    subprocess.run([ptxas, "-arch=sm_90a", "-O3", source, "-o", cubin], check=True)
    code = subprocess.run([nvdisasm, "-hex", cubin], check=True, capture_output=True, text=True).stdout
    order, boards = [], 0
    # Of the 128 bits of an instruction, 110 to 112 name the scoreboard that it sets (7: none), 116 to 121 those that it waits for.
    for text, upper in re.findall(r"/\*[0-9a-f]+\*/\s+([^;]*);\s+/\* 0x[0-9a-f]+ \*/\s+/\* 0x([0-9a-f]+) \*/", code):
        sets, waits = int(upper, 16) >> 46 & 7, int(upper, 16) >> 52 & 63
        for each in ("LDSM", "MEMBAR", "FENCE.VIEW.ASYNC", "SYNCS.ARRIVE", "HMMA"):
            if each in text:
                boards |= 1 << sets if each == "LDSM" and sets < 7 else 0
                said = f" ({'waits' if waits & boards else 'does not wait'} for LDSM)" if each in ("SYNCS.ARRIVE", "HMMA") else ""
                order.append(each + said)
    print(f"{name}:", ", ".join(order))
    found.append(order)
loads, ends = ["LDSM", "LDSM"], ["SYNCS.ARRIVE (does not wait for LDSM)", "HMMA (waits for LDSM)"]
sys.exit(found != [loads + ends, [*loads, "MEMBAR", "FENCE.VIEW.ASYNC", *ends]])
PYTHON
