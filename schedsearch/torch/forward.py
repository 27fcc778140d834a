"""Names that optimized models which were saved by earlier versions refer to."""

from __future__ import annotations

from schedsearch.torch.models.forward import _same
from schedsearch.torch.models.instance_forward import Replicate as _Replicate
from schedsearch.torch.models.instance_forward import own_forward as _own_forward

__all__ = ["_Replicate", "_own_forward", "_same"]
