"""The networks of benchmarks, NAME:BATCH:FORMAT: a file of `onnx_models.py`, or else a model of `torch_models.py`.

A name that both know is the file, whose batch norms are part of the weights. FORMAT is float16, or int8 for a file.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Case:
    """A network.

    Examples:
        >>> Case.of("resnet50:1:int8").is_file
        True
        >>> Case.of("densenet121:32:float16").batch
        32
    """

    name: str
    batch: int
    format: str

    @classmethod
    def of(cls, text: str) -> Case:
        """Raises ValueError if the text is not NAME:BATCH:FORMAT, or a model of PyTorch is wanted in int8."""
        parts = text.split(":")
        if len(parts) != 3 or not parts[1].isdecimal() or int(parts[1]) < 1 or parts[2] not in ("float16", "int8"):
            raise ValueError(f"case {text!r} is not possible; allowed: NAME:BATCH:float16 or NAME:BATCH:int8")
        found = cls(parts[0], int(parts[1]), parts[2])
        if found.format == "int8" and not found.is_file:
            raise ValueError(f"case {text!r} is not possible: {found.name} is a model of PyTorch, which has no int8 here")
        return found

    def __str__(self) -> str:
        return f"{self.name}:{self.batch}:{self.format}"

    @property
    def is_file(self) -> bool:
        """Whether it is a file of `onnx_models.py`."""
        import onnx_models

        return self.name in onnx_models.BUILDERS

    def given(self, folder: Path) -> tuple[Any, ...]:
        """What `schedsearch.build` and `network_of` take: the path of a file, written to a folder, or a module and its
        input."""
        if self.is_file:
            import onnx_models

            return (onnx_models.saved(str(self), folder),)
        return self.module

    @cached_property
    def module(self) -> tuple[torch.nn.Module, torch.Tensor]:
        """As a module of PyTorch in float32, with an input, both on the host."""
        import torch

        if self.is_file:
            import onnx_models
            import onnx_torch

            model = onnx_models.build(self.name, batch=self.batch)
            shape = [each.dim_value for each in model.graph.input[0].type.tensor_type.shape.dim]
            return onnx_torch.as_module(model), torch.randn(shape, generator=torch.Generator().manual_seed(0))
        import torch_models

        size = torch_models.SIZES.get(self.name, 224)
        x = torch.randn((self.batch, 3, size, size), generator=torch.Generator().manual_seed(0))
        module = torch_models.make(self.name)
        where = "cuda" if torch.cuda.is_available() else "cpu"
        with torch.no_grad():
            torch_models.normalise(module.to(where), x.to(where))
        return module.cpu(), x


def network_of(given: tuple[Any, ...]) -> Any:
    """The lowered network of what `Case.given` returns, for images in NHWC."""
    from schedsearch.network.lower import lower
    from schedsearch.network.model import read_model
    from schedsearch.network.torch_export import export

    model = read_model(*given) if len(given) == 1 else export(*given)
    return lower(model, dtype="float16").with_io_layout("NHWC")
