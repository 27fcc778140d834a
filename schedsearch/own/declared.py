"""What users declare about a kernel, checked: every mistake that the declaration shows is reported at once, at its place."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from types import FunctionType
from typing import Any

import numpy as np

from schedsearch.backend.code_identity import names_read
from schedsearch.errors import UsageError, did_you_mean
from schedsearch.ops.own_kernel import AFTER
from schedsearch.space import ConfigSpace, Constraint, Knob
from schedsearch.templates.own_kernel.definition import Formulation
from schedsearch.templates.own_kernel.launches import Launch
from schedsearch.templates.own_kernel.rules import predicate
from schedsearch.text import type_text


def formulation(
    function: Callable[..., object],
    settings: Mapping[str, object],
    before: Iterable[Launch],
    workspaces: Mapping[str, Any],
    knobs: Mapping[str, Sequence[Any]],
    rules: Iterable[str],
    default: Mapping[str, Any],
) -> Formulation:
    """One way to compute the outputs, from what a decorator was given.

    Args:
        function: the last kernel.
        settings: how it is launched; the fields of `Launch`.

    Raises:
        UsageError: something does not fit the function; the text says what, and what is allowed.
    """
    if not isinstance(knobs, Mapping) or not all(_is_list(given) for given in knobs.values()):
        raise UsageError(f"knobs is a mapping of lists, got {knobs!r}; write knobs={{'tile': (8, 16)}}")
    if isinstance(rules, str):
        raise UsageError("rules is a list of strings, got one string; write rules=['tile * tile <= 1024']")
    rules = tuple(rules)
    if wrong := [rule for rule in rules if not isinstance(rule, str)]:
        raise UsageError(f"a rule is a string over the knobs, got {type_text(wrong[0])}; write 'tile * tile <= 1024'")
    launches = (*_checked_before(before), _launch(function, settings))
    name = launches[-1].function.__name__
    values = {knob: tuple(given) for knob, given in knobs.items()}
    first = {knob: given[0] for knob, given in values.items() if given}
    made = Formulation(name, launches, dict(workspaces), values, rules, {**first, **default})
    _check_workspaces(made)
    _check_knobs(made)
    _check_default(name, values, default)
    known = tuple(dict.fromkeys((*made.arguments, *workspaces, "k")))
    for launch in launches:
        for what, each in launch.settings.items():
            check_function(what, each, known)
    for workspace, each in workspaces.items():
        check_function(f"workspace {workspace}", each, known)
    _check_rules(made)
    return made


def plain_function(function: object) -> FunctionType:
    """The function itself, also of a kernel that `numba.cuda.jit` decorates.

    Raises:
        UsageError: it is something else.
    """
    plain = getattr(function, "py_func", function)
    if not isinstance(plain, FunctionType):
        raise UsageError(f"a tunable is a Python function, got {type_text(function)}")
    return plain


_JIT_OPTIONS = ("fastmath", "max_registers")  # that a launch has too


def jit_settings(function: object) -> dict[str, Any]:
    """The options of a launch that `numba.cuda.jit` below the decorator was given.

    Raises:
        UsageError: it made a device function, or links files.
    """
    options = getattr(function, "targetoptions", None) or {}
    name = getattr(function, "__name__", "it")
    if options.get("device"):
        raise UsageError(f"{name} is a device function, which kernels call; a tunable is a kernel: leave out device=True")
    if options.get("link"):
        raise UsageError(f"{name} links {options['link']}; a tunable is compiled from its Python code alone")
    return {option: options[option] for option in _JIT_OPTIONS if options.get(option)}


def _is_list(given: object) -> bool:
    return isinstance(given, Iterable) and not isinstance(given, str)


def check_options(settings: Mapping[str, object], own: Callable[..., object] | None = None) -> None:
    """Raises UsageError for an option that is neither one of a launch nor a named parameter of the decorator `own`."""
    named = [] if own is None else [name for name in inspect.signature(own).parameters if name not in ("self", "settings")]
    known = list(dict.fromkeys([*named, *(each.name for each in fields(Launch)[1:])]))
    for name in settings:
        if name not in known:
            raise UsageError(f"a tunable has no option {name!r}{did_you_mean(name, known)}; allowed: {', '.join(known)}")


def _launch(function: object, settings: Mapping[str, object]) -> Launch:
    check_options(settings)
    made = Launch(plain_function(function), **settings)
    _check_parameters(made.function)
    return made


def _checked_before(before: Iterable[Launch]) -> list[Launch]:
    found = []
    for each in [before] if isinstance(before, Launch) else before:
        if not isinstance(each, Launch):
            raise UsageError(
                f"before is a list of launches, got {type_text(each)}; write before=[schedsearch.Launch(kernel, "
                "grid=..., block=...)]"
            )
        found.append(_launch(each.function, each.settings))
    return found


def _check_workspaces(made: Formulation) -> None:
    taken = {name for launch in made.launches for name in launch.parameters}
    for name in made.workspaces:
        if name not in taken:
            raise UsageError(f"no kernel takes the workspace {name!r}{did_you_mean(name, sorted(taken))}; remove it")


def _check_parameters(function: FunctionType) -> None:
    """Raises UsageError for parameters that a kernel cannot have."""
    positional = 0
    for name, each in inspect.signature(function).parameters.items():
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            raise UsageError(f"{function.__qualname__} takes *{name}; a tunable names every parameter")
        if each.kind is not each.KEYWORD_ONLY:
            positional += 1
            if each.default is not each.empty:
                raise UsageError(
                    f"{name} of {function.__qualname__} has a default; a tunable takes every argument from the caller"
                )
    if not positional:
        raise UsageError(f"{function.__qualname__} has no arguments; a kernel takes arrays")


def _check_knobs(made: Formulation) -> None:
    if not made.knobs:
        raise UsageError(f"{made.name} has no knobs; give knobs={{'threads': (128, 256)}}")
    for knob, values in made.knobs.items():
        Knob(knob, values)
    for launch in made.launches:
        for knob in launch.knobs:
            if knob not in made.knobs:
                raise UsageError(
                    f"{launch.function.__name__} has the keyword-only parameter {knob!r}, which is not a "
                    f"knob{did_you_mean(knob, list(made.knobs))}; give knobs its values, or put it before the *"
                )
    kernel_knobs = {knob for launch in made.launches for knob in launch.knobs}
    used = frozenset().union(*(names_read(launch.function) & set(launch.knobs) for launch in made.launches))
    read_outside = frozenset().union(*(names_read(each) for each in made.functions))
    for knob in made.knobs:
        if knob not in kernel_knobs and knob not in read_outside:
            hint = did_you_mean(knob, [*kernel_knobs, *read_outside])
            raise UsageError(
                f"knob {knob!r} is neither a keyword-only parameter of {made.name} nor read by grid, block or shared{hint}; "
                "remove it, or add it to the parameters after the *"
            )
        if knob in kernel_knobs and knob not in used and knob not in read_outside:
            raise UsageError(f"knob {knob!r} is not used by {made.name}, nor by grid, block or shared; remove it")


def _check_default(name: str, knobs: Mapping[str, tuple[Any, ...]], default: Mapping[str, object]) -> None:
    for knob, value in default.items():
        if knob not in knobs:
            raise UsageError(
                f"default of {name} names {knob!r}{did_you_mean(knob, list(knobs))}; the knobs are {', '.join(knobs)}"
            )
        if value not in knobs[knob]:
            raise UsageError(f"default of {name} has {knob}={value!r}; allowed: {', '.join(map(str, knobs[knob]))}")


def _check_rules(made: Formulation) -> None:
    """Raises UsageError if the default configuration breaks a rule."""
    space = ConfigSpace(
        [Knob(knob, values) for knob, values in made.knobs.items()],
        [Constraint(rule, predicate(rule, tuple(made.knobs))) for rule in made.rules],
    )
    if not (broken := space.check(made.default)):
        return
    found = space.sample(1, np.random.default_rng(0))
    remedy = f"give another one: default={dict(found[0])}" if found else "no values of the knobs keep all rules; change them"
    raise UsageError(f"the default configuration of {made.name} {broken[0]}; {remedy}")


def check_names(
    name: str, parameters: tuple[str, ...], written: Sequence[str], inplace: Iterable[str], inputs: Mapping[str, object]
) -> None:
    """Raises UsageError if outputs, in-place arguments or `inputs` name something that is not an argument."""
    for each in (*written, *inputs):
        if each not in parameters:
            raise UsageError(
                f"{name} has no argument {each!r}{did_you_mean(each, parameters)}; it takes {', '.join(parameters)}"
            )
    if not written:
        raise UsageError(f"{name} names no outputs; give outputs=[...], or inplace=[...] for arrays that it updates")
    if twice := sorted({each for each in written if list(written).count(each) > 1}):
        raise UsageError(f"{twice[0]!r} of {name} is named twice; an argument is either an output or in place")
    for each in inplace:
        if each + AFTER in parameters:
            raise UsageError(f"{name} has arguments {each!r} and {each + AFTER!r}; rename the second")


def check_function(what: str, given: object, allowed: tuple[str, ...]) -> None:
    """Raises UsageError if a function takes something else than these names."""
    if not callable(given):
        return
    for parameter in inspect.signature(given).parameters.values():
        if parameter.name not in allowed:
            hint = did_you_mean(parameter.name, list(allowed))
            raise UsageError(f"{what} takes {parameter.name!r}{hint}; allowed: {', '.join(allowed)} (k holds the knobs)")


def check_written(made: Formulation, written: Sequence[str]) -> None:
    """Raises UsageError if the source of a kernel shows that it writes an argument that is not named."""
    for launch in made.launches:
        unnamed = sorted(written_arguments(launch.function) - {*written, *launch.knobs, *made.workspaces})
        if unnamed:
            raise UsageError(
                f"{launch.function.__name__} writes {', '.join(unnamed)}; name it in outputs=, or in inplace= if it is also "
                "read, or in workspaces= if only a later kernel reads it"
            )


def written_arguments(function: FunctionType) -> set[str]:
    """Parameters that the function assigns elements of, as far as its source shows; empty without a source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return set()
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            found.add(node.value.id)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("cuda.atomic.") and node.args:
            found |= {node.args[0].id} if isinstance(node.args[0], ast.Name) else set()
    return found & set(inspect.signature(function).parameters)
