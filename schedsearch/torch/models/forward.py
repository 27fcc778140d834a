"""What an optimized module calls in place of its own `forward`: a plan for calls like the example, else what was there.

See docs/decisions/137 for why modules stay, and 178 for why the checks are our own.
"""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
import weakref
from typing import Any

import torch
from torch import nn

from schedsearch.torch.models.guards import guard_of_calls, guard_of_traces
from schedsearch.torch.models.instance_forward import REPLICATE, InstanceForward, Replicate, is_own, own_forward
from schedsearch.torch.models.plan import Plan
from schedsearch.torch.models.signature import unlike
from schedsearch.torch.operators.formats import allows_tf32
from schedsearch.torch.operators.transforms import computes

_OF_FUNCTIONS = ("__name__", "__qualname__", "__doc__", "__code__", "__globals__", "__defaults__", "__kwdefaults__")
_names = (f"forward {number}" for number in itertools.count())
_forwards: weakref.WeakValueDictionary[str, OptimizedForward] = weakref.WeakValueDictionary()  # by name


class OptimizedForward(InstanceForward):
    """The `forward` of an optimized module. It says once when a call is unlike every example; copies of it do not.

    It has the signature and the source of the forward that was there, as torch.export, torch.jit and callers look for them.
    """

    def __init__(self, module: nn.Module, before: Any, *, warns: bool = True) -> None:
        super().__init__(module, before)
        self._name, self._warns = next(_names), warns
        self._plans: list[Plan] = []
        functools.update_wrapper(self, self.before or own_forward(module), _OF_FUNCTIONS, ())
        _forwards[self._name] = self

    @classmethod
    def install(cls, module: nn.Module, plan: Plan) -> None:
        """Lets a module run a rewritten plan for calls like its example."""
        forward = module.__dict__.get("forward")
        if not isinstance(forward, OptimizedForward):
            forward = cls(module, forward)
            forward.enter()
        plan.seal(guard_of_calls(plan, module), guard_of_traces(plan))
        forward._plans = [plan, *(each for each in forward._plans if each._expected != plan._expected)]

    @classmethod
    def drop(cls, module: nn.Module, plan: Plan) -> None:
        """Undoes `install`."""
        forward = module.__dict__.get("forward")
        if isinstance(forward, OptimizedForward):
            forward._plans = [each for each in forward._plans if each is not plan]
            if not forward._plans:
                forward.remove()

    def give_up(self) -> None:
        """Runs what was there before, from now on."""
        self._plans = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not computes():
            return self.original(*args, **kwargs)
        for number, plan in enumerate(self._plans):
            leaves = plan.leaves(args, kwargs)
            if leaves is not None and (tensors := self._tensors(number, plan, leaves)) is not None:
                return plan.run(tensors, leaves)
        if not torch.compiler.is_compiling() and self._warns:
            self._warn(args, kwargs)
        return self.original(*args, **kwargs)

    def _tensors(self, number: int, plan: Plan, leaves: list[Any]) -> list[Any] | None:
        """The module's tensors that a plan takes; None if it must not serve a call."""
        if self._module.training or torch.are_deterministic_algorithms_enabled() or plan.tf32 != allows_tf32():
            return None
        if torch.is_autocast_enabled(_device_type(leaves)):
            return None
        if torch.compiler.is_compiling():
            tensors = plan.traced(self._module) if _unchanged_while_tracing(self._name, number) else None
        else:
            tensors = plan.unchanged(self._module)
        if tensors is not None and torch.is_grad_enabled():
            for each in (*leaves, *tensors):
                if isinstance(each, torch.Tensor) and each.requires_grad:
                    return None
        return tensors

    def _warn(self, args: tuple[object, ...], kwargs: dict[str, Any]) -> None:
        if not self._plans or self._module.training or any(plan.leaves(args, kwargs) is not None for plan in self._plans):
            return
        self._warns = False
        text = unlike(args, kwargs, [plan._expected for plan in self._plans])
        warnings.warn(f"a call of the optimized {type(self._module).__name__} with {text}", stacklevel=3)

    def __deepcopy__(self, memo: dict[int, Any]) -> OptimizedForward:
        module = copy.deepcopy(self._module, memo)  # the copy under way, or one that this makes
        found = OptimizedForward(module, copy.deepcopy(self.before, memo), warns=False)
        memo[id(self)] = found
        found._plans = list(self._plans)
        return found

    def __reduce__(self) -> Any:
        """A saved model is one that was not optimized."""
        if self.before is not None:
            return _same, (self.before,)
        return own_forward, (self._module,)


@torch.compiler.assume_constant_result
def _unchanged_while_tracing(name: str, number: int) -> bool:
    """What only the guard of calls compares; once, while a graph is traced. Before PyTorch 2.13 the arguments of a constant
    must be constants: a string, not an object."""
    forward = _forwards[name]
    return forward._plans[number].unchanged(forward._module) is not None


def _same(value: object) -> Any:
    return value


def restore(module: nn.Module) -> None:
    """Gives a module the forward that it had before it was optimized, also if it was saved meanwhile. A forward that calls
    the optimized one remains, and calls what was there before."""
    forward, replicate = module.__dict__.get("forward"), module.__dict__.get(REPLICATE)
    if isinstance(forward, OptimizedForward):
        forward.remove()
    elif isinstance(replicate, Replicate):
        del module.__dict__[REPLICATE]
        if is_own(module, forward):
            del module.__dict__["forward"]
        elif isinstance(replicate.forward, OptimizedForward):
            replicate.forward.give_up()


def _device_type(leaves: list[Any]) -> str:
    return next((str(each.device.type) for each in leaves if isinstance(each, torch.Tensor)), "cpu")
