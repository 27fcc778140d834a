"""The `forward` that lies in an instance of a module, in place of the method of its class."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from schedsearch.torch.models.settings import OURS

REPLICATE = OURS[1]  # DataParallel calls it on each module


class InstanceForward:
    """A `forward` that lies in an instance, so that the class and other instances are untouched.

    Args:
        before: what lay in the instance; None: nothing, or the method of its class.
    """

    def __init__(self, module: nn.Module, before: Any) -> None:
        self._module, self.before = module, None if is_own(module, before) else before

    def enter(self) -> None:
        """Becomes the module's forward."""
        self._module.__dict__ |= {"forward": self, REPLICATE: Replicate(self._module, self)}

    def remove(self) -> None:
        """Gives the module the forward that it had."""
        self._module.__dict__.pop(REPLICATE, None)
        if self.before is None:
            del self._module.__dict__["forward"]
        else:
            self._module.__dict__["forward"] = self.before

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """What the module's forward was before."""
        if self.before is None:
            return type(self._module).forward(self._module, *args, **kwargs)
        return self.before(*args, **kwargs)


class Replicate:
    """How DataParallel copies an optimized module: without the plan, whose tensors are those of the module itself.

    Attributes:
        forward: of the module when it was optimized, which somebody may have wrapped since.
    """

    def __init__(self, module: nn.Module, forward: Any) -> None:
        self._module, self.forward = module, forward

    def __call__(self) -> Any:
        replica = type(self._module)._replicate_for_data_parallel(self._module)
        forward = replica.__dict__.pop("forward", None)
        del replica.__dict__[REPLICATE]
        before = getattr(forward, "before", None)  # a model that was saved has the forward of its class
        if before is not None:
            replica.__dict__["forward"] = before
        return replica


def own_forward(module: nn.Module) -> Any:
    return types.MethodType(type(module).forward, module)


def is_own(module: nn.Module, forward: object) -> bool:
    """Whether a `forward` in an instance is the method of its class, as in a model that was saved."""
    return isinstance(forward, types.MethodType) and forward == own_forward(module)


def is_replaced(module: nn.Module) -> bool:
    """Whether somebody gave an instance another forward than that of its class."""
    forward = module.__dict__.get("forward")
    if isinstance(forward, InstanceForward):
        forward = forward.before
    return forward is not None and not is_own(module, forward)


def is_optimized(module: nn.Module) -> bool:
    return isinstance(module.__dict__.get("forward"), InstanceForward)


@contextlib.contextmanager
def without_plans(module: nn.Module) -> Iterator[None]:
    """Lets optimized modules run as they did before."""
    held = [each.__dict__["forward"] for each in module.modules() if is_optimized(each)]
    for forward in held:
        forward.remove()
    try:
        yield
    finally:
        for forward in held:
            forward.enter()
