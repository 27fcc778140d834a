"""What `optimize_` and the backend did with each layer of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from schedsearch.text import counted
from schedsearch.torch.layers.graph_nodes import Layer, Refused
from schedsearch.torch.layers.selection import Selected


@dataclass(frozen=True)
class LayerReport:
    """One layer.

    Attributes:
        name: of the module that makes the convolution, such as layer1.0.conv1.
        kernel: the workload in words, such as "conv2d 1x56x56x64 k64 3x3 pad1 f16 NHWC+scale_shift+relu"; empty if none
            describes the layer.
        swapped: whether a kernel takes its place; without times, whether it is a candidate of Inductor's max-autotune.
        reason: why not.
        ours_us, torch_us: measured times; None if they were not measured.
        record_id: row of the kernel's record in the database; None if it has none.
        level: how the kernel was found; see `schedsearch.compile`.
        error, torch_error: largest differences from PyTorch in float32 over the largest magnitude: of the kernel, and of
            PyTorch in the layer's own format.
    """

    name: str
    kernel: str = ""
    swapped: bool = False
    reason: str = ""
    ours_us: float | None = None
    torch_us: float | None = None
    record_id: int | None = None
    level: str = ""
    error: float | None = None
    torch_error: float | None = None

    @property
    def is_candidate(self) -> bool:
        """Whether Inductor's max-autotune compares the kernel with its own code."""
        return self.swapped and self.ours_us is None

    @classmethod
    def of(cls, layer: Layer | Refused, selected: Selected | None) -> LayerReport:
        if isinstance(layer, Refused):
            return cls(layer.name, reason=layer.reason)
        if selected is None:
            return cls(layer.name, layer.workload.label, reason="filter_fn leaves it out")
        return cls(
            layer.name,
            layer.workload.label,
            selected.call is not None,
            selected.reason,
            us(selected.ours_ns),
            us(selected.theirs_ns),
            selected.record_id,
            selected.level,
            selected.error,
            selected.torch_error,
        )


@dataclass(frozen=True)
class PartReport:
    """A part of a graph that a network of ours can compute.

    Attributes:
        name: of its first and its last module.
        nodes: how many nodes of the graph it has.
        served: whether a network computes it.
        reason: why not.
        ours_us, torch_us: measured times of the network, and of the same part in PyTorch; None if not measured.
        error, torch_error: their largest differences from PyTorch in float32 over the largest magnitude.
        is_least: whether torch_us is what its convolutions alone take in PyTorch, so that nothing else was compiled.
    """

    name: str
    nodes: int
    served: bool = False
    reason: str = ""
    ours_us: float | None = None
    torch_us: float | None = None
    error: float | None = None
    torch_error: float | None = None
    is_least: bool = False

    @classmethod
    def of(cls, name: str, nodes: int, found: NetworkReport) -> PartReport:
        times, errors = (found.ours_us, found.torch_us), (found.error, found.torch_error)
        return cls(name, nodes, found.served, found.reason, *times, *errors, found.is_least)


@dataclass(frozen=True)
class NetworkReport:
    """A graph as networks of ours: the whole, or its parts.

    Attributes:
        served: whether networks compute the graph or parts of it.
        reason: why not.
        ours_us, torch_us: measured times of the graph with networks, and of Inductor's graph in a CUDA graph; None if not
            measured.
        error, torch_error: their largest differences from PyTorch in float32 over the largest magnitude; of the whole only.
        is_least: whether torch_us is what the convolutions alone take, which PyTorch's compiler makes no faster.
        parts: what became of each part, if the whole has no network.
        left: what no part has because schedsearch lacks it, one line for each operator of PyTorch.
        seconds: that it took to build and to measure them.
    """

    served: bool
    reason: str = ""
    ours_us: float | None = None
    torch_us: float | None = None
    error: float | None = None
    torch_error: float | None = None
    is_least: bool = False
    parts: tuple[PartReport, ...] = ()
    left: tuple[str, ...] = ()
    seconds: float = field(default=0.0, compare=False)

    def __str__(self) -> str:
        facts = ""
        if self.ours_us is not None:
            what = "with its parts the graph" if self.parts else "the network"
            facts = f"{what} takes {self.ours_us:.1f} us, Inductor's graph {self.torch_us:.1f} us"
        if self.error is not None:
            facts += f"; errors {self.error:.1e} and {self.torch_error:.1e}"
        served = [part for part in self.parts if part.served]
        if self.served:
            who = (
                f"networks of ours serve {len(served)} of {len(self.parts)} parts"
                if self.parts
                else "a network of ours serves"
            )
            first = f"{who}: {facts}; decided in {self.seconds:.1f} s"
        else:
            first = f"no network of ours: {self.reason}" + (f" ({facts})" if facts else "")
        return "\n".join([first, *part_lines(self.parts), *self.left])


@dataclass(frozen=True)
class Report:
    """Every layer of a model, in order. `print(report)` shows a table.

    Attributes:
        network: of a graph of torch.compile, if networks were tried.
        parts: of a model that `optimize_` took, if networks were asked for.
        ours_us, torch_us: measured times of the whole model with kernels, and without; None if they were not measured.
        notes: what holds for the whole model, such as why nothing was done.
        seconds: that it took.
    """

    layers: tuple[LayerReport, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = field(default=0.0, compare=False)
    network: NetworkReport | None = None
    parts: tuple[PartReport, ...] = ()
    ours_us: float | None = None
    torch_us: float | None = None

    @property
    def is_used(self) -> bool:
        """Whether anything of the model runs in a kernel."""
        return bool(self.swapped) or any(part.served for part in self.parts)

    @property
    def swapped(self) -> tuple[LayerReport, ...]:
        return tuple(layer for layer in self.layers if layer.swapped)

    @property
    def headline(self) -> str:
        """The result in one line."""
        if self.ours_us is not None and self.torch_us is not None and self.is_used:
            gain = f"{self.torch_us / self.ours_us:.2f}x as fast: {self.ours_us:.1f} us instead of {self.torch_us:.1f} us"
            return f"the model is {gain}; {len(self.swapped)} of {counted(len(self.layers), 'layer')} run in kernels"
        why = "; ".join(self.notes)
        if self.ours_us is not None:
            why = "it is not faster as a whole"
        elif self.layers:
            why = f"none of {counted(len(self.layers), 'layer')} is faster in a kernel"
        return f"the model remains as it was: {why}"

    @property
    def saved_us(self) -> float:
        """The sum of PyTorch's measured times of the swapped layers, less those of the kernels."""
        return sum((layer.torch_us or 0.0) - (layer.ours_us or 0.0) for layer in self.swapped)

    def __str__(self) -> str:
        lines = [*self.notes, *([] if self.network is None else [str(self.network)])]
        if self.ours_us is not None:
            kept = "" if self.is_used else ", so it remains as it was"
            lines.append(f"the model takes {self.ours_us:.1f} us with kernels and {self.torch_us:.1f} us without{kept}")
        lines += part_lines(self.parts)
        if self.layers:
            done = "have a candidate" if any(layer.is_candidate for layer in self.layers) else "swapped"
            told = f"{len(self.swapped)} of {counted(len(self.layers), 'layer')} {done} in {self.seconds:.1f} s"
            if done == "swapped" and self.swapped:
                before = sum(layer.torch_us or 0.0 for layer in self.swapped)
                told += f"; {'it takes' if len(self.swapped) == 1 else 'they take'} "
                told += f"{before - self.saved_us:.1f} us instead of {before:.1f} us"
            lines.append(told)
            header = ("layer", "ours us", "torch us", "record", "error", "torch's", "what")
            lines += _table([header, *(_row(layer) for layer in self.layers)])
        return "\n".join(lines)


def part_lines(parts: Sequence[PartReport]) -> list[str]:
    """A table of parts."""
    if not parts:
        return []
    header = ("part", "nodes", "ours us", "torch us", "error", "torch's", "what")
    rows = [
        (
            part.name,
            str(part.nodes),
            _shown(part.ours_us, ".1f"),
            ("at least " if part.is_least else "") + _shown(part.torch_us, ".1f"),
            _shown(part.error, ".1e"),
            _shown(part.torch_error, ".1e"),
            "a network" if part.served else f"kept: {part.reason}",
        )
        for part in parts
    ]
    return _table([header, *rows])


def _shown(number: float | None, form: str) -> str:
    return "" if number is None else format(number, form)


def _row(layer: LayerReport) -> tuple[str, ...]:
    what = layer.kernel if layer.swapped else f"kept: {layer.reason}"
    if layer.is_candidate:
        what = f"candidate: {layer.kernel}"
    return (
        layer.name,
        _shown(layer.ours_us, ".2f"),
        _shown(layer.torch_us, ".2f"),
        "" if layer.record_id is None else str(layer.record_id),
        _shown(layer.error, ".1e"),
        _shown(layer.torch_error, ".1e"),
        what,
    )


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    last = len(widths) - 1
    return [
        "  ".join(
            cell if place == last else cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths))
        )
        for row in rows
    ]


def us(nanoseconds: float | None) -> float | None:
    """Microseconds of a time in nanoseconds."""
    return None if nanoseconds is None else nanoseconds / 1e3
