"""A graph of torch.compile as a whole network of ours, where this is faster than what Inductor makes of it."""

from __future__ import annotations

import copy
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from schedsearch.errors import NoValidConfigError, PreparationError, SchedsearchError, WrongResultError
from schedsearch.torch.calls import Kernels
from schedsearch.torch.formats import without_tf32
from schedsearch.torch.report import NetworkReport
from schedsearch.torch.store import capturing
from schedsearch.torch.timing import Timer

Compiled = Callable[..., Any]
_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float32: 1e-3}
_WORSE = 2.0  # times the compiled graph's own error that a network may have, above the tolerance
_MARGIN = 0.98
_RUNS = 20
_ALIGNMENT = 256  # bytes, more than a kernel needs; a captured call cannot copy inputs to where they have it
_captured_nets: list[Any] = []  # CUDA graphs use their memory, and nothing says when these end


class Network:
    """What torch.compile calls: a network of ours, or the compiled graph.

    The first call decides, because only then are all tensors real. A network holds copies of the weights. Every call checks
    that the tensors of the model are the same and were not written to since; once they were, the compiled graph serves.

    While a CUDA graph is captured, the network's kernels are captured one by one. The CUDA graph then uses the network's
    memory, and the weights as they were: the network is never freed, and replays do not see new weights.

    Args:
        module: the graph.
        inputs: of the graph, when it was compiled; parameters and buffers among them are told by torch's mark.
        compiled: what Inductor made of the graph.
        tell: takes what was decided.
        tune_s: seconds to tune kernels that have no record; None: none are tuned.
        captures: whether the compiled graph can be part of a CUDA graph.
        timer: for tests; default: see `_time`.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        compiled: Compiled,
        kernels: Kernels,
        tell: Callable[[NetworkReport], None],
        *,
        tune_s: float | None,
        captures: bool,
        timer: Timer | None,
    ) -> None:
        self._module: fx.GraphModule | None = module
        self._held = [place for place, each in enumerate(inputs) if _is_held(each)]
        self._given = [place for place in range(len(inputs)) if place not in set(self._held)]
        self._compiled, self._kernels, self._tell = compiled, kernels, tell
        self._tune_s, self._captures, self._timer = tune_s, captures, timer
        self._net: Any = None
        self._seen: list[tuple[int, int]] = []
        self._like: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]] = []
        self._stream: torch.cuda.Stream | None = None
        self._lock = threading.Lock()
        self._turns = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        captured = capturing(self._kernels.device)
        if self._module is not None:
            if captured:  # to build and to measure would break the capture
                return self._compiled(*args)
            with self._lock:
                module, self._module = self._module, None
                if module is not None:
                    self._decide(module, args)
        if self._net is None:
            return self._compiled(*args)
        if not self._holds_what_it_copied(args):
            if captured:  # to free memory would break the capture
                return self._compiled(*args)
            self._close()
            self._tell(NetworkReport(False, "weights have changed since it was built; Inductor's code computes from now on"))
            return self._compiled(*args)
        given = [args[place] for place in self._given]
        if [_form(each) for each in given] != self._like or (
            torch.is_grad_enabled() and any(x.requires_grad for x in given)
        ):
            return self._compiled(*args)
        return self._run_captured(given, args) if captured else self._run(given)

    def _run_captured(self, given: Sequence[torch.Tensor], args: Sequence[Any]) -> Any:
        if any(each.data_ptr() % _ALIGNMENT for each in given):
            return self._compiled(*args)
        if self._net not in _captured_nets:
            _captured_nets.append(self._net)
        return _as_tuple(self._net(*given))

    def _holds_what_it_copied(self, args: Sequence[Any]) -> bool:
        try:
            return _versions([args[place] for place in self._held]) == self._seen
        except RuntimeError:  # a tensor of inference mode has no version
            return False

    def _run(self, given: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        if self._kernels.device.type == "cpu":
            return _as_tuple(self._net(*given))
        with self._turns:  # its memory is one for all streams
            stream = torch.cuda.current_stream(self._kernels.device)
            if self._stream is not None and stream != self._stream:
                stream.wait_stream(self._stream)
            self._stream = stream
            return _as_tuple(self._net(*given))

    def _decide(self, module: fx.GraphModule, args: Sequence[Any]) -> None:
        started = time.perf_counter()
        try:
            found = self._measured(module, args)
        except (SchedsearchError, _Refusal) as error:
            found = NetworkReport(False, str(error).splitlines()[0])
        except Exception as error:  # torch's exporters raise errors of many kinds
            found = NetworkReport(False, f"{type(error).__name__}: {error}"[:300])
        if not found.served:
            self._close()
        self._tell(replace(found, seconds=time.perf_counter() - started))

    def _measured(self, module: fx.GraphModule, args: Sequence[Any]) -> NetworkReport:
        given = [args[place] for place in self._given]
        held = [args[place] for place in self._held]
        if not given or not all(type(each) in (torch.Tensor, nn.Parameter) for each in args):
            raise _Refusal("it has inputs that are not plain tensors")
        frozen = _frozen(module, dict(zip(self._held, held)))
        self._seen, self._like = _versions(held), [_form(each) for each in given]
        with torch.no_grad():
            self._net = self._built(frozen, given)
            expected = _without_effects(self._compiled, args)
            errors = self._errors(frozen, given, expected)
            times = self._times(given, args)
        served = times[0] <= _MARGIN * times[1]
        return NetworkReport(served, "" if served else "Inductor's graph is as fast or faster", *times, *errors)

    def _close(self) -> None:
        if self._net is not None and self._net not in _captured_nets:
            if self._kernels.device.type == "cuda":
                torch.cuda.synchronize(self._kernels.device)
            self._net.close()
        self._net = None

    def _built(self, frozen: fx.GraphModule, given: Sequence[torch.Tensor]) -> Any:
        from schedsearch.executable.build import build

        nhwc = any(each.dim() == 4 and each.is_contiguous(memory_format=torch.channels_last) for each in given)
        options: dict[str, Any] = {"io_layout": "NHWC" if nhwc else "NCHW", "target": self._kernels.target}
        options["db"] = self._kernels.db
        try:
            return build(frozen, tuple(given), tune_s=self._tune_s, **options)
        except (NoValidConfigError, PreparationError, WrongResultError):  # of one kernel; the others have records now
            return build(frozen, tuple(given), **options)

    def _errors(
        self, frozen: fx.GraphModule, given: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
    ) -> tuple[float, float]:
        """The largest errors of the network and of the compiled graph against float32, over the largest magnitude.

        Raises:
            _Refusal: the network's is too large, or an output has another shape.
        """
        found = self._run(given)
        if [_form(each) for each in found] != [_form(each) for each in expected]:
            raise _Refusal("its outputs are in another order in memory than PyTorch's")
        with without_tf32():
            exact = copy.deepcopy(frozen).float()(*(each.float() if each.is_floating_point() else each for each in given))
        worst = [0.0, 0.0]
        for truth, ours, theirs in zip(exact, found, expected):
            most = float(truth.abs().max()) or 1.0
            errors = [float((each.float() - truth.float()).abs().max()) / most for each in (ours, theirs)]
            if not errors[0] <= max(_TOLERANCE.get(ours.dtype, 0.0), _WORSE * errors[1]):
                raise _Refusal(f"its error against float32 is {errors[0]:.1e}, PyTorch's {errors[1]:.1e}")
            worst = [max(pair) for pair in zip(worst, errors)]
        return worst[0], worst[1]

    def _times(self, given: Sequence[torch.Tensor], args: Sequence[Any]) -> tuple[float, float]:
        """Microseconds of the network and of the compiled graph, each in its fastest form: both as CUDA graphs."""
        if self._timer is not None:
            return self._timer.ns([lambda: self._run(given)]) / 1e3, self._timer.ns([lambda: self._compiled(*args)]) / 1e3
        if self._kernels.device.type == "cpu":
            return _host_us(lambda: self._run(given)), _host_us(lambda: self._compiled(*args))
        compiled: Callable[[], Any] = lambda: self._compiled(*args)  # noqa: E731
        with torch.cuda.device(self._kernels.device):
            return _event_us(lambda: self._run(given)), _event_us(_captured(compiled) if self._captures else compiled)


class _Refusal(Exception):
    """Why no network is used."""


def _as_tuple(found: Any) -> tuple[torch.Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def _without_effects(call: Compiled, args: Sequence[Any]) -> list[torch.Tensor]:
    """The outputs of a graph.

    Raises:
        _Refusal: it writes to its inputs, or returns one of them.
    """
    before = [each.clone() for each in args]
    found = list(call(*args))
    if not all(torch.equal(each, old) for each, old in zip(args, before)):
        raise _Refusal("the graph writes to its inputs")
    if {each.data_ptr() for each in args} & {each.data_ptr() for each in found}:
        raise _Refusal("the graph returns an input")
    return found


def _is_held(each: Any) -> bool:
    """Whether an input of a graph is a parameter or buffer of the model."""
    return isinstance(each, nn.Parameter) or getattr(each, "_dynamo_static_input_type", None) is not None


def _versions(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Changes whenever a tensor is replaced, moved or written to. Raises RuntimeError for tensors of inference mode."""
    return [(each.data_ptr(), each._version) for each in tensors]


def _form(each: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    return tuple(each.shape), each.stride(), each.dtype


def _frozen(module: fx.GraphModule, held: dict[int, torch.Tensor]) -> fx.GraphModule:
    """The graph with parameters and buffers as its own."""
    if any(each.is_inference() for each in held.values()):
        raise _Refusal("its parameters were made in inference mode, which does not say when they change")
    frozen = fx.GraphModule(module, module.graph)
    for place, node in enumerate([each for each in frozen.graph.nodes if each.op == "placeholder"]):
        if place not in held:
            continue
        name = f"held_{place}"
        frozen.register_buffer(name, held[place].detach())
        with frozen.graph.inserting_after(node):
            new = frozen.graph.get_attr(name)
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        frozen.graph.erase_node(node)
    frozen.recompile()
    return frozen.eval()


def _captured(call: Callable[[], Any]) -> Callable[[], Any]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    replay: Callable[[], Any] = graph.replay
    return replay


def _event_us(call: Callable[[], Any]) -> float:
    """The median over groups of calls that follow one another."""
    for _ in range(3):
        call()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(_RUNS):
        first.record()
        for _ in range(5):
            call()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) * 200)
    return float(statistics.median(times))


def _host_us(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(_RUNS):
        started = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - started)
    return statistics.median(times[2:]) / 1e3
