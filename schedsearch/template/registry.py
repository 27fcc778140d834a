"""Which templates there are, built-in and installed, and the set of them that a run uses."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any

from schedsearch.errors import UnsupportedError, UsageError, did_you_mean
from schedsearch.ops import operator
from schedsearch.target import Target
from schedsearch.template.contract import Reference, Template
from schedsearch.workload import Workload

ENTRY_POINT_GROUP = "schedsearch.templates"

# Built-ins by name, imported when first asked for; an import has no side effect.
BUILT_IN = {
    "conv2d_wgmma": "schedsearch.templates.conv2d.wgmma:Conv2dWgmma",
    "conv2d_halo": "schedsearch.templates.conv2d.halo:Conv2dHalo",
    "conv2d_stem": "schedsearch.templates.conv2d.stem:Conv2dStem",
    "conv2d_unfold": "schedsearch.templates.conv2d.unfold:Conv2dUnfold",
    "conv2d_mma": "schedsearch.templates.conv2d.mma:Conv2dMma",
    "conv2d_cpu": "schedsearch.templates.conv2d.cpu:Conv2dCpu",
}


class TemplateSet(Mapping[str, Template]):
    """Templates by name, in the order in which they were added."""

    def __init__(self, templates: Iterable[Template]) -> None:
        self._templates: dict[str, Template] = {}
        for template in templates:
            if template.name in self._templates:
                raise UsageError(f"two templates are named {template.name!r}; names must be unique")
            self._templates[template.name] = template

    def __getitem__(self, name: str) -> Template:
        try:
            return self._templates[name]
        except KeyError:
            raise KeyError(f"no template {name!r}{did_you_mean(name, self._templates)}; known: {', '.join(self)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._templates)

    def __len__(self) -> int:
        return len(self._templates)

    def matching(self, workload: Workload, target: Target) -> list[Template]:
        """Those that can run the workload on the target.

        Raises:
            UnsupportedError: none can; the message gives each template's reason.
        """
        reasons, others, found = [], [], []
        for template in self.values():
            if template.op != workload.op:
                others.append(f"{template.name} is for {template.op}")
            elif template.kind != target.kind:
                reasons.append(f"{template.name} is for {template.kind}")
            elif reason := template.validate(workload, target):
                reasons.append(f"{template.name}: {reason}")
            else:
                found.append(template)
        if not found:
            raise UnsupportedError(
                f"no template can run {workload.label} on {target.name}: "
                + "; ".join(reasons or others or ["there is no template at all"])
            )
        return found


def load_template(name: str) -> Template:
    """One template, built-in or installed by a third party, without importing the others.

    Raises:
        UsageError: unknown name.
    """
    if name in BUILT_IN:
        return _load(BUILT_IN[name])  # type: ignore[no-any-return]
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name == name:
            return point.load()()  # type: ignore[no-any-return]
    raise UsageError(f"no template {name!r}{did_you_mean(name, template_names())}; known: {', '.join(template_names())}")


def load_templates(names: Iterable[str] | None = None) -> TemplateSet:
    """The templates of these names; all built-in and installed ones by default."""
    return TemplateSet(load_template(name) for name in (template_names() if names is None else names))


def template_names() -> list[str]:
    return list(dict.fromkeys([*BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))]))


def load_reference(op: str) -> Reference:
    """The reference that an operator names.

    Raises:
        UnknownOperatorError: there is no such operator.
    """
    return _load(operator(op).reference)  # type: ignore[no-any-return]


def _load(location: str) -> Any:
    module, _, name = location.partition(":")
    return getattr(importlib.import_module(module), name)()
