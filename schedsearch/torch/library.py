"""Registers `torch.ops.schedsearch`: schemas, implementations for CPU and CUDA, and fake kernels.

It uses `Library.define` and `impl`, whose calls cost less host time than those of `torch.library.custom_op`.
"""

from __future__ import annotations

import torch

from schedsearch.torch import conv2d

_OPERATORS = ((conv2d.SCHEMA, conv2d.conv2d, conv2d.fake_conv2d),)

_library = torch.library.Library("schedsearch", "FRAGMENT")
for _schema, _compute, _fake in _OPERATORS:
    _name = _schema.partition("(")[0]
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _compute, _key)
    torch.library.register_fake(f"schedsearch::{_name}", _fake, lib=_library)
