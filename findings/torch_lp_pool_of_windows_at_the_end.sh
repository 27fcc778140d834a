#!/bin/sh
# torch 2.13.0
# torch.nn.LPPool1d and LPPool2d are the p-th root of a sum over the window, by their documentation. With ceil_mode the last window may
# hold fewer numbers than the kernel; it is computed as their average times the size of the kernel, as if the numbers that are missing
# were there. With p = 1, which the documentation calls sum pooling, two ones sum to 3. ONNX's LpPool in ONNX Runtime sums what is there.
# A torch.onnx export writes an AveragePool, and so keeps PyTorch's numbers.
# Seen on 2026-11-29 (five ones, windows of 3 with stride 3):
#     p = 1: [3.0, 3.0], right: [3.0, 2.0]
#     p = 2: [1.732, 1.732], right: [1.732, 1.414]
# Exits 0 while torch behaves like that.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import torch

found = []
for p in (1, 2):
    pooled = torch.nn.LPPool1d(p, 3, stride=3, ceil_mode=True)(torch.ones(1, 1, 5))
    found.append([round(each, 3) for each in pooled.ravel().tolist()])
    right = [round(count ** (1 / p), 3) for count in (3, 2)]
    print(f"p = {p}: {found[-1]}, right: {right}")
sys.exit(found != [[3.0, 3.0], [1.732, 1.732]])
PYTHON
