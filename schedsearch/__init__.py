"""schedsearch searches for fast schedules of parameterised kernels, keeps them and serves them.

Each name is imported when it is first used (PEP 562), so that `import schedsearch` is cheap everywhere. Authors of
templates find everything else that they need in `schedsearch.template`.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from schedsearch import compat

if TYPE_CHECKING:
    from schedsearch.config import Config
    from schedsearch.constructors.convolutions import batch_matmul, conv2d, dense, depthwise_conv2d
    from schedsearch.constructors.images import dyn_resize, nms, pool2d, resize, roi_align, squeeze_excite
    from schedsearch.constructors.movement import (
        concat,
        depth_to_space,
        dyn_strided_slice,
        fill_margin,
        layout_transform,
        pad,
        space_to_depth,
        strided_slice,
        transpose,
    )
    from schedsearch.constructors.numbers import elementwise, layer_norm, softmax
    from schedsearch.constructors.open_shapes import arange, dyn_concat, expand, reshape, where
    from schedsearch.constructors.recurrence import recurrent
    from schedsearch.constructors.selection import gather, nonzero, scatter, topk, unique
    from schedsearch.constructors.sequences import causal_conv1d_update, conv1d, depthwise_conv1d
    from schedsearch.device.detect import detect
    from schedsearch.dynamic.build import build_dynamic
    from schedsearch.dynamic.executable import DynamicExecutable
    from schedsearch.errors import (
        ArgumentError,
        ConfigError,
        DatabaseError,
        DatabaseLockedError,
        DeviceBusyError,
        DeviceError,
        Interrupted,
        NoRecordError,
        NoValidConfigError,
        OperatorError,
        PlanError,
        PreparationError,
        RegressionError,
        SchedsearchError,
        SchemaVersionError,
        UnknownOperatorError,
        UnsupportedError,
        UntrustedDatabaseError,
        UntunedWarning,
        UnusableRecordError,
        UsageError,
        WorkloadError,
        WrongResultError,
    )
    from schedsearch.executable.build import build
    from schedsearch.executable.coverage import coverage
    from schedsearch.executable.file import load
    from schedsearch.executable.net import Net
    from schedsearch.executable.sized import SizedNet
    from schedsearch.ops.epilogues import Epilogue
    from schedsearch.ops.packing import pack, unpack
    from schedsearch.own.decorator import Tunable, tunable
    from schedsearch.own.deployed import own_kernel
    from schedsearch.runtime import Kernel, KernelCache, RangeKernel
    from schedsearch.runtime.deploy import compile, explain
    from schedsearch.session import plan_tasks
    from schedsearch.session.observer import Observer
    from schedsearch.session.summary import RunSummary
    from schedsearch.session.tune import tune
    from schedsearch.target import Target
    from schedsearch.task import Task
    from schedsearch.template import Template, load_templates
    from schedsearch.templates.own_kernel.launches import Launch, folded, unfolded
    from schedsearch.workload import Workload, WorkloadRange

compat.install()

_HOMES = {
    "ArgumentError": "schedsearch.errors",
    "Config": "schedsearch.config",
    "ConfigError": "schedsearch.errors",
    "DatabaseError": "schedsearch.errors",
    "DatabaseLockedError": "schedsearch.errors",
    "DeviceBusyError": "schedsearch.errors",
    "DeviceError": "schedsearch.errors",
    "DynamicExecutable": "schedsearch.dynamic.executable",
    "Epilogue": "schedsearch.ops.epilogues",
    "Interrupted": "schedsearch.errors",
    "Kernel": "schedsearch.runtime.kernel",
    "KernelCache": "schedsearch.runtime.cache",
    "Launch": "schedsearch.templates.own_kernel.launches",
    "Net": "schedsearch.executable.net",
    "NoRecordError": "schedsearch.errors",
    "NoValidConfigError": "schedsearch.errors",
    "Observer": "schedsearch.session.observer",
    "OperatorError": "schedsearch.errors",
    "PlanError": "schedsearch.errors",
    "PreparationError": "schedsearch.errors",
    "RangeKernel": "schedsearch.runtime.range_kernel",
    "RegressionError": "schedsearch.errors",
    "RunSummary": "schedsearch.session.summary",
    "SchedsearchError": "schedsearch.errors",
    "SchemaVersionError": "schedsearch.errors",
    "SizedNet": "schedsearch.executable.sized",
    "Target": "schedsearch.target",
    "Task": "schedsearch.task",
    "Template": "schedsearch.template",
    "Tunable": "schedsearch.own.decorator",
    "UnknownOperatorError": "schedsearch.errors",
    "UnsupportedError": "schedsearch.errors",
    "UnusableRecordError": "schedsearch.errors",
    "UntrustedDatabaseError": "schedsearch.errors",
    "UntunedWarning": "schedsearch.errors",
    "UsageError": "schedsearch.errors",
    "Workload": "schedsearch.workload",
    "WorkloadError": "schedsearch.errors",
    "WorkloadRange": "schedsearch.workload",
    "WrongResultError": "schedsearch.errors",
    "batch_matmul": "schedsearch.constructors.convolutions",
    "build": "schedsearch.executable.build",
    "build_dynamic": "schedsearch.dynamic.build",
    "causal_conv1d_update": "schedsearch.constructors.sequences",
    "compile": "schedsearch.runtime.deploy",
    "concat": "schedsearch.constructors.movement",
    "conv1d": "schedsearch.constructors.sequences",
    "conv2d": "schedsearch.constructors.convolutions",
    "coverage": "schedsearch.executable.coverage",
    "dense": "schedsearch.constructors.convolutions",
    "depth_to_space": "schedsearch.constructors.movement",
    "depthwise_conv1d": "schedsearch.constructors.sequences",
    "depthwise_conv2d": "schedsearch.constructors.convolutions",
    "detect": "schedsearch.device.detect",
    "elementwise": "schedsearch.constructors.numbers",
    "explain": "schedsearch.runtime.deploy",
    "folded": "schedsearch.templates.own_kernel.launches",
    "gather": "schedsearch.constructors.selection",
    "layer_norm": "schedsearch.constructors.numbers",
    "recurrent": "schedsearch.constructors.recurrence",
    "layout_transform": "schedsearch.constructors.movement",
    "load": "schedsearch.executable.file",
    "load_templates": "schedsearch.template",
    "nms": "schedsearch.constructors.images",
    "nonzero": "schedsearch.constructors.selection",
    "arange": "schedsearch.constructors.open_shapes",
    "dyn_concat": "schedsearch.constructors.open_shapes",
    "fill_margin": "schedsearch.constructors.movement",
    "dyn_resize": "schedsearch.constructors.images",
    "expand": "schedsearch.constructors.open_shapes",
    "reshape": "schedsearch.constructors.open_shapes",
    "where": "schedsearch.constructors.open_shapes",
    "own_kernel": "schedsearch.own.deployed",
    "pack": "schedsearch.ops.packing",
    "pad": "schedsearch.constructors.movement",
    "plan_tasks": "schedsearch.session",
    "pool2d": "schedsearch.constructors.images",
    "resize": "schedsearch.constructors.images",
    "roi_align": "schedsearch.constructors.images",
    "scatter": "schedsearch.constructors.selection",
    "softmax": "schedsearch.constructors.numbers",
    "space_to_depth": "schedsearch.constructors.movement",
    "squeeze_excite": "schedsearch.constructors.images",
    "dyn_strided_slice": "schedsearch.constructors.movement",
    "strided_slice": "schedsearch.constructors.movement",
    "topk": "schedsearch.constructors.selection",
    "transpose": "schedsearch.constructors.movement",
    "tunable": "schedsearch.own.decorator",
    "tune": "schedsearch.session",
    "unfolded": "schedsearch.templates.own_kernel.launches",
    "unique": "schedsearch.constructors.selection",
    "unpack": "schedsearch.ops.packing",
}

__all__ = [
    "ArgumentError",
    "Config",
    "ConfigError",
    "DatabaseError",
    "DatabaseLockedError",
    "DeviceBusyError",
    "DeviceError",
    "DynamicExecutable",
    "Epilogue",
    "Interrupted",
    "Kernel",
    "KernelCache",
    "Launch",
    "Net",
    "NoRecordError",
    "NoValidConfigError",
    "Observer",
    "OperatorError",
    "PlanError",
    "PreparationError",
    "RangeKernel",
    "RegressionError",
    "RunSummary",
    "SchedsearchError",
    "SchemaVersionError",
    "SizedNet",
    "Target",
    "Task",
    "Template",
    "Tunable",
    "UnknownOperatorError",
    "UnsupportedError",
    "UntrustedDatabaseError",
    "UntunedWarning",
    "UnusableRecordError",
    "UsageError",
    "Workload",
    "WorkloadError",
    "WorkloadRange",
    "WrongResultError",
    "arange",
    "batch_matmul",
    "build",
    "build_dynamic",
    "causal_conv1d_update",
    "compile",
    "concat",
    "conv1d",
    "conv2d",
    "coverage",
    "dense",
    "depth_to_space",
    "depthwise_conv1d",
    "depthwise_conv2d",
    "detect",
    "dyn_concat",
    "dyn_resize",
    "dyn_strided_slice",
    "elementwise",
    "expand",
    "explain",
    "fill_margin",
    "folded",
    "gather",
    "layer_norm",
    "layout_transform",
    "load",
    "load_templates",
    "nms",
    "nonzero",
    "own_kernel",
    "pack",
    "pad",
    "plan_tasks",
    "pool2d",
    "recurrent",
    "reshape",
    "resize",
    "roi_align",
    "scatter",
    "softmax",
    "space_to_depth",
    "squeeze_excite",
    "strided_slice",
    "topk",
    "transpose",
    "tunable",
    "tune",
    "unfolded",
    "unique",
    "unpack",
    "where",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'schedsearch' has no attribute {name!r}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
