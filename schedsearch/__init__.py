"""schedsearch searches for fast schedules of parameterised kernels, keeps them and serves them.

Each name is imported when it is first used (PEP 562), so that `import schedsearch` is cheap everywhere. Authors of
templates find everything else that they need in `schedsearch.template`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from schedsearch import compat

if TYPE_CHECKING:
    from schedsearch.config import Config
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
        UnusableRecordError,
        UsageError,
        WorkloadError,
        WrongResultError,
    )
    from schedsearch.executable.build import build
    from schedsearch.executable.file import load
    from schedsearch.executable.net import Net
    from schedsearch.executable.sized import SizedNet
    from schedsearch.ops.arange import arange
    from schedsearch.ops.batch_matmul import batch_matmul
    from schedsearch.ops.concat import concat
    from schedsearch.ops.conv2d import conv2d
    from schedsearch.ops.dense import dense
    from schedsearch.ops.depth_to_space import depth_to_space, space_to_depth
    from schedsearch.ops.depthwise_conv2d import depthwise_conv2d
    from schedsearch.ops.dyn_concat import dyn_concat
    from schedsearch.ops.dyn_resize import dyn_resize
    from schedsearch.ops.dyn_strided_slice import dyn_strided_slice
    from schedsearch.ops.elementwise import elementwise
    from schedsearch.ops.expand import expand
    from schedsearch.ops.fill_margin import fill_margin
    from schedsearch.ops.gather import gather
    from schedsearch.ops.layer_norm import layer_norm
    from schedsearch.ops.layout_transform import layout_transform
    from schedsearch.ops.nms import nms
    from schedsearch.ops.nonzero import nonzero
    from schedsearch.ops.packing import pack, unpack
    from schedsearch.ops.pad import pad
    from schedsearch.ops.pool2d import pool2d
    from schedsearch.ops.reshape import reshape
    from schedsearch.ops.resize import resize
    from schedsearch.ops.roi_align import roi_align
    from schedsearch.ops.scatter import scatter
    from schedsearch.ops.softmax import softmax
    from schedsearch.ops.strided_slice import strided_slice
    from schedsearch.ops.topk import topk
    from schedsearch.ops.transpose import transpose
    from schedsearch.ops.unique import unique
    from schedsearch.ops.where import where
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
    from schedsearch.workload import Workload
    from schedsearch.workload_range import WorkloadRange

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
    "UsageError": "schedsearch.errors",
    "Workload": "schedsearch.workload",
    "WorkloadError": "schedsearch.errors",
    "WorkloadRange": "schedsearch.workload_range",
    "WrongResultError": "schedsearch.errors",
    "batch_matmul": "schedsearch.ops.batch_matmul",
    "build": "schedsearch.executable.build",
    "build_dynamic": "schedsearch.dynamic.build",
    "compile": "schedsearch.runtime.deploy",
    "concat": "schedsearch.ops.concat",
    "conv2d": "schedsearch.ops.conv2d",
    "dense": "schedsearch.ops.dense",
    "depth_to_space": "schedsearch.ops.depth_to_space",
    "depthwise_conv2d": "schedsearch.ops.depthwise_conv2d",
    "detect": "schedsearch.device.detect",
    "elementwise": "schedsearch.ops.elementwise",
    "explain": "schedsearch.runtime.deploy",
    "folded": "schedsearch.templates.own_kernel.launches",
    "gather": "schedsearch.ops.gather",
    "layer_norm": "schedsearch.ops.layer_norm",
    "layout_transform": "schedsearch.ops.layout_transform",
    "load": "schedsearch.executable.file",
    "load_templates": "schedsearch.template",
    "nms": "schedsearch.ops.nms",
    "nonzero": "schedsearch.ops.nonzero",
    "arange": "schedsearch.ops.arange",
    "dyn_concat": "schedsearch.ops.dyn_concat",
    "fill_margin": "schedsearch.ops.fill_margin",
    "dyn_resize": "schedsearch.ops.dyn_resize",
    "expand": "schedsearch.ops.expand",
    "reshape": "schedsearch.ops.reshape",
    "where": "schedsearch.ops.where",
    "own_kernel": "schedsearch.own.deployed",
    "pack": "schedsearch.ops.packing",
    "pad": "schedsearch.ops.pad",
    "plan_tasks": "schedsearch.session",
    "pool2d": "schedsearch.ops.pool2d",
    "resize": "schedsearch.ops.resize",
    "roi_align": "schedsearch.ops.roi_align",
    "scatter": "schedsearch.ops.scatter",
    "softmax": "schedsearch.ops.softmax",
    "space_to_depth": "schedsearch.ops.depth_to_space",
    "dyn_strided_slice": "schedsearch.ops.dyn_strided_slice",
    "strided_slice": "schedsearch.ops.strided_slice",
    "topk": "schedsearch.ops.topk",
    "transpose": "schedsearch.ops.transpose",
    "tunable": "schedsearch.own.decorator",
    "tune": "schedsearch.session",
    "unfolded": "schedsearch.templates.own_kernel.launches",
    "unique": "schedsearch.ops.unique",
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
    "compile",
    "concat",
    "conv2d",
    "dense",
    "depth_to_space",
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
    "reshape",
    "resize",
    "roi_align",
    "scatter",
    "softmax",
    "space_to_depth",
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
    raise AttributeError(f"module 'schedsearch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
