#!/bin/sh
# torch 2.13.0
# PyTorch's version counter says whether a tensor was written to in place: autograd raises an error by it if a value that a
# backward pass needs has changed. A BatchNorm in training mode writes its running statistics without counting that, and the
# fused optimizers write all parameters without counting it; the optimizers that are not fused do count. So a graph that is
# kept across a fused step gives wrong gradients silently, where any other optimizer raises the error.
# Seen on 2026-11-29:
#     BatchNorm2d: running_mean changed, versions 1 -> 1
#     SGD fused=False: version 0 -> 1, gradient after the step: RuntimeError, right: [[2.0]]
#     SGD fused=True: version 0 -> 0, gradient after the step: [[0.0]], right: [[2.0]]
# Exits 0 while torch behaves like that.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/python" - <<'PYTHON'
import sys

import torch

norm = torch.nn.BatchNorm2d(3)
before, version = norm.running_mean.clone(), norm.running_mean._version
norm(torch.ones(2, 3, 4, 4))
silent = not torch.equal(before, norm.running_mean) and norm.running_mean._version == version
print("BatchNorm2d: running_mean changed, versions", version, "->", norm.running_mean._version)
found = {}
for fused in (False, True):
    weight = torch.nn.Parameter(torch.tensor([[1.0]]))
    x = torch.ones(1, 1, requires_grad=True)
    y = (weight * weight * x).sum()  # its gradient by x is weight ** 2 = 1
    (first,) = torch.autograd.grad(y, weight, retain_graph=True)  # 2
    weight.grad = torch.ones_like(weight)
    version = weight._version
    torch.optim.SGD([weight], lr=1.0, fused=fused).step()  # the weight is 0 now
    try:
        (second,) = torch.autograd.grad(y, weight)
        found[fused] = str(second.tolist())
    except RuntimeError as error:
        found[fused] = type(error).__name__
    print(f"SGD {fused=}: version {version} -> {weight._version}, gradient after the step: {found[fused]}, right: {first.tolist()}")
sys.exit(not (silent and found == {False: "RuntimeError", True: "[[0.0]]"}))
PYTHON
