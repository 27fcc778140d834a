"""Tasks as the text of a workload file, in the form that a person would write."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Sequence
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from schedsearch.task import Task
from schedsearch.typed import JsonObject

_SHARED = ("op", "dtype", "weight_dtype", "layout")  # keys that go under `defaults` if every task has the same value
_WINDOW = ("stride", "padding", "dilation")
_WIDTH = 125


def dump(tasks: Iterable[Task], *, comment: str = "") -> str:
    """A workload file of these tasks, which `parse` reads as the same tasks.

    Args:
        comment: lines before the file's first key.

    Raises:
        ValueError: there are no tasks.

    Examples:
        >>> from schedsearch import Workload
        >>> layer = Workload.conv2d(n=1, h=56, w=56, c=64, k=64, r=3, s=3, padding=1, epilogue=["bias", "relu"])
        >>> print(dump([Task(layer, weight=3, name="conv1")]), end="")
        version: 1
        defaults: {op: conv2d}
        tasks:
        - {name: conv1, shape: {c: 64, h: 56, k: 64, n: 1, r: 3, s: 3, w: 56}, epilogue: [bias, relu], padding: 1, weight: 3}
    """
    entries = [_entry(task) for task in tasks]
    if not entries:
        raise ValueError("a workload file needs at least one task")
    shared = {
        key: entries[0][key] for key in _SHARED if key in entries[0] and all(e.get(key) == entries[0][key] for e in entries)
    }
    rows = CommentedSeq([_flow({k: v for k, v in entry.items() if k not in shared}) for entry in entries])
    document = CommentedMap({"version": 1, "defaults": _flow(shared), "tasks": rows})
    if comment:
        document.yaml_set_start_comment(comment)
    yaml = YAML()
    yaml.width = _WIDTH
    out = io.StringIO()
    yaml.dump(document, out)
    return out.getvalue()


def _entry(task: Task) -> JsonObject:
    """The keys of a task, without those that have their default."""
    workload = task.workload
    parameters = workload.definition.parameters()
    given = json.loads(workload.json)["params"]
    sizes = {name: value for name, value in given.items() if name in parameters and parameters[name].size}
    others = {name: _short(name, value) for name, value in given.items() if name not in sizes}
    entry: JsonObject = {"op": workload.op}
    if task.name != workload.label:
        entry["name"] = task.name
    entry |= {"shape": sizes, **others}
    if task.weight != 1:
        entry["weight"] = int(task.weight) if task.weight == int(task.weight) else task.weight
    if task.restrict:
        entry["restrict"] = {name: list(values) for name, values in task.restrict.items()}
    if task.templates is not None:
        entry["templates"] = list(task.templates)
    return entry


def _short(name: str, value: object) -> Any:
    """One number for a window's list of equal ones."""
    return value[0] if name in _WINDOW and isinstance(value, Sequence) and len(set(value)) == 1 else value


def _flow(value: object) -> Any:
    """The value in YAML's flow style: on one line if it fits."""
    if isinstance(value, dict):
        found: Any = CommentedMap({key: _flow(each) for key, each in value.items()})
    elif isinstance(value, list):
        found = CommentedSeq([_flow(each) for each in value])
    else:
        return value
    found.fa.set_flow_style()
    return found
