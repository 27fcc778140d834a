"""Turns a network and its plan into a program: a kernel for each call, places for all arrays, and packed constants."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from schedsearch.executable.branches import Access, Order, Work, blocks_of, callers, ordered
from schedsearch.executable.memory import Block, arrange, stacked
from schedsearch.executable.onnx_runtime import ONNX_RUNTIME
from schedsearch.executable.predicted import span_ns
from schedsearch.executable.program import Array, Call, ChosenKernel, Foreign, Origin, Place, Program, Reference
from schedsearch.executable.program import Control as ProgramControl
from schedsearch.executable.program import Impossible as ImpossibleProgram
from schedsearch.executable.references import packed
from schedsearch.executable.schedule import Held, Memory, Schedule, ScheduledCall, schedule
from schedsearch.identity import sha256_hex
from schedsearch.launch import Artifact, LaunchPlan
from schedsearch.network.graph import Constant, Control, Impossible, Network, Plan, Subgraph
from schedsearch.ops.dtypes import dtype
from schedsearch.target import multiprocessors
from schedsearch.workload import Workload


@dataclass(frozen=True)
class Executable:
    """A program with its code and its weights.

    Attributes:
        artifacts: by sha256.
        weights: the bytes of each constant of the program, in its order.
        models: sha256 -> ONNX model of each call of ONNX Runtime.
        references: sha256 of a weight -> where it lies outside of the file that `stored.save` writes.
        inner: number of a call with programs of its own -> the executables of those that can run.
    """

    program: Program
    artifacts: Mapping[str, Artifact]
    weights: Sequence[memoryview]
    models: Mapping[str, bytes] = field(default_factory=dict)
    references: Mapping[str, Reference] = field(default_factory=dict)
    inner: Mapping[int, tuple[Executable, ...]] = field(default_factory=dict)

    def bodies(self, number: int) -> Sequence[Executable]:
        return self.inner[number]


def assemble(
    network: Network,
    plan: Plan,
    kernel: Callable[[Workload], ChosenKernel],
    *,
    target: str,
    model: str = "",
    reasons: Iterable[str] = (),
    packing: Packing | None = None,
) -> Executable:
    """The executable of a network. The same arguments give the same bytes.

    Args:
        network, plan: what to run; every implementation of the plan must have a kernel.
        kernel: gives the kernel of a workload; it is called once for each distinct one.
        target: key of the device that the kernels are for.
        model: name of the model's file.
        reasons: lines that explain the plan.
        packing: packs the constants; one for several networks packs what they share once.
    """
    packing = packing or Packing()
    found = schedule(network, plan)
    workloads = dict.fromkeys(call.computes for call in found.calls if isinstance(call.computes, Workload))
    chosen = {workload: kernel(workload) for workload in workloads}
    models = {
        sha256_hex(subgraph.model): subgraph.model for call in found.calls if isinstance(subgraph := call.computes, Subgraph)
    }
    inner = {
        number: tuple(
            assemble(body, of_body, kernel, target=target, model=model, packing=packing)
            for body, of_body in zip(call.computes.networks, plan.bodies[call.name])
        )
        for number, call in enumerate(found.calls)
        if isinstance(call.computes, Control)
    }
    controls = {number: _control(found.calls[number].computes, several) for number, several in inner.items()}
    places = _Places(found, chosen, {number: each.workspaces for number, each in controls.items()}, multiprocessors(target))
    arrays = tuple(
        Array(
            held.name,
            held.layout,
            held.axes,
            tuple(held.shape),
            held.dtype,
            tuple(held.stored),
            places.of_memory(held.memory),
        )
        for held in found.arrays
    )
    constants = tuple(index for index, held in enumerate(found.arrays) if held.memory.kind == "constant")
    known = network.all_constants
    weights = [packing(known[found.arrays[index].name], found.arrays[index]) for index in constants]
    program = Program(
        target=target,
        model=model,
        arrays=arrays,
        inputs=tuple(found.inputs),
        outputs=tuple(found.outputs),
        constants=constants,
        calls=tuple(
            _call(call, chosen, workspaces, controls.get(number))
            for number, (call, workspaces) in enumerate(zip(found.calls, places.workspaces))
        ),
        copies=tuple(found.copies),
        arena_bytes=places.arena_bytes,
        least_arena_bytes=places.least_arena_bytes,
        constant_bytes=places.constant_bytes,
        predicted_ns=_predicted_ns(plan, found, inner, places, target),
        reasons=tuple(reasons),
        weights=tuple(sha256 for sha256, _ in weights),
    )
    artifacts = {each.artifact.sha256: each.artifact for each in chosen.values()}
    return Executable(program, artifacts, [memoryview(each) for _, each in weights], models, inner=inner)


def _predicted_ns(
    plan: Plan, found: Schedule, inner: Mapping[int, tuple[Executable, ...]], places: _Places, target: str
) -> float:
    """The time of a network whose branches run side by side where they can; 0 if the plan has none. What ONNX Runtime
    computes is left out."""
    if not plan.times_ns:
        return plan.predicted_ns
    longest_ns = {
        number: max((each.program.predicted_ns for each in several), default=0.0) for number, several in inner.items()
    }
    times_ns = [
        plan.times_ns[call.computes.id] if isinstance(call.computes, Workload) else longest_ns.get(number, 0.0)
        for number, call in enumerate(found.calls)
    ]
    if places.order is None:
        return sum(times_ns)
    return span_ns(places.order, times_ns, [work.blocks for work in places.works], target, multiprocessors(target))


class Packing:
    """The bytes of constants in the layouts and dtypes that kernels read, with their digests. It keeps them for the next
    constant with the very same array."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str, str, str], tuple[object, str, bytes]] = {}

    def __call__(self, constant: Constant, held: Held) -> tuple[str, bytes]:
        key = id(constant.array), constant.axes, held.layout, held.dtype
        if key not in self._known:
            data = packed(constant.array, constant.axes, held.layout, held.dtype)
            assert len(data) == math.prod(held.stored) * dtype(held.dtype).nbytes
            self._known[key] = constant.array, sha256_hex(data), data  # the array, because an identity is that of a live one
        _, sha256, data = self._known[key]
        return sha256, data


def _control(control: object, networks: Sequence[Executable]) -> ProgramControl:
    assert isinstance(control, Control)
    programs = iter(each.program for each in networks)
    return ProgramControl(
        tuple(ImpossibleProgram(body.reason) if isinstance(body, Impossible) else next(programs) for body in control.bodies),
        control.kind,
    )


def _call(
    call: ScheduledCall,
    chosen: Mapping[Workload, ChosenKernel],
    workspaces: Mapping[str, Place],
    control: ProgramControl | None,
) -> Call:
    buffers, outputs = {**call.arguments, **call.outputs}, tuple(call.outputs)
    if isinstance(call.computes, Control):
        kind = call.computes.kind
        origin = Origin(kind, kind, "")
        return Call(call.name, call.sources, "", kind, "", buffers, outputs, workspaces, {}, origin, control=control)
    if isinstance(subgraph := call.computes, Subgraph):
        foreign = Foreign(len(subgraph.model), subgraph.reasons)
        origin, sha256 = Origin(ONNX_RUNTIME, ONNX_RUNTIME, ""), sha256_hex(subgraph.model)
        return Call(call.name, call.sources, "", _label(subgraph), sha256, buffers, outputs, {}, {}, origin, foreign=foreign)
    workload = subgraph
    scalars = {scalar.name: scalar.default for scalar in workload.scalars} | dict(call.scalars)
    return Call(
        call.name,
        tuple(call.sources),
        workload.json,
        workload.label,
        chosen[workload].artifact.sha256,
        buffers,
        outputs,
        workspaces,
        scalars,
        chosen[workload].origin,
        dict(call.offsets),
    )


def _label(subgraph: Subgraph) -> str:
    """The operators of a subgraph, e.g. "LSTM, 2 Einsum"."""
    counts = Counter(reason.partition(":")[0] for reason in subgraph.reasons)
    return ", ".join(op if count == 1 else f"{count} {op}" for op, count in counts.items())


class _Places:
    """Where everything is.

    Attributes:
        works: what each call does, on a GPU.
        order: in which calls wait for one another; None: one after the other, on a CPU.
        workspaces: of each call, by name.
    """

    def __init__(
        self,
        found: Schedule,
        chosen: Mapping[Workload, ChosenKernel],
        of_controls: Mapping[int, Mapping[str, int]],
        sms: int,
    ) -> None:
        """Args:
        of_controls: number of a call with programs of its own -> bytes of its workspaces.
        sms: multiprocessors of a GPU, on which calls may run side by side; else 0.
        """
        self._found = found
        plans = [chosen[each].artifact.plan if isinstance(each := call.computes, Workload) else None for call in found.calls]
        ready = [plan is not None and _is_prepacked(found, call, plan.constants) for call, plan in zip(found.calls, plans)]
        lasting: list[tuple[int, str, int]] = []  # number of the call, name and bytes of what its constant steps write
        passing = [(number, name, nbytes) for number, own in of_controls.items() for name, nbytes in own.items()]
        for number, plan in enumerate(plans):
            if plan is None:
                continue
            kept = plan.constant_workspaces if ready[number] else {}
            for name, nbytes in plan.workspaces.items():
                (lasting if name in kept else passing).append((number, name, nbytes))
        self._place_constants(lasting, self._read_once(plans, ready))
        self.works = _works(found, plans, ready, sms) if sms else []
        self.order = ordered(self.works, sms) if sms else None
        self._place_arena(passing, self.order)
        self.workspaces: list[dict[str, Place]] = [{} for _ in found.calls]
        for (number, name, _), place in zip([*lasting, *passing], [*self._lasting, *self._passing]):
            self.workspaces[number][name] = place

    def of_memory(self, memory: Memory) -> Place:
        if memory.kind in ("input", "output"):
            return Place(memory.kind, 0, memory.number)
        return self._of[id(memory)]

    def _read_once(self, plans: Sequence[LaunchPlan | None], ready: Sequence[bool]) -> set[int]:
        """Constants, by the identity of their memory, that no step reads after the executable was loaded."""
        later = set()
        for call, plan, prepacked in zip(self._found.calls, plans, ready):
            steps = [] if plan is None else [step for step in plan.steps if not (step.constant and prepacked)]
            names = {name for step in steps for name in step.buffers} if plan is not None else {*call.arguments}
            later |= {id(self._found.arrays[index].memory) for name, index in call.arguments.items() if name in names}
        later |= {id(self._found.arrays[source].memory) for source, _ in self._found.copies}  # outputs
        return {id(each) for each in self._constants} - later

    @property
    def _constants(self) -> list[Memory]:
        return [held.memory for held in self._found.arrays if held.memory.kind == "constant"]

    def _place_constants(self, lasting: Sequence[tuple[int, str, int]], once: set[int]) -> None:
        kept = [memory for memory in self._constants if id(memory) not in once]
        dropped = [memory for memory in self._constants if id(memory) in once]
        offsets, self.constant_bytes = stacked([*(memory.nbytes for memory in kept), *(nbytes for *_, nbytes in lasting)])
        self._of = {id(memory): Place("constant", offset) for memory, offset in zip(kept, offsets)}
        self._lasting = [Place("constant", offset) for offset in offsets[len(kept) :]]
        offsets, _ = stacked(memory.nbytes for memory in dropped)
        self._of |= {id(memory): Place("once", offset) for memory, offset in zip(dropped, offsets)}

    def _place_arena(self, passing: Sequence[tuple[int, str, int]], order: Order | None) -> None:
        own = list({id(held.memory): held.memory for held in self._found.arrays if held.memory.kind == "arena"}.values())
        blocks = [Block(memory.nbytes, memory.first, memory.last) for memory in own]
        blocks += [Block(nbytes, number, number) for number, _, nbytes in passing]
        if order is not None and not order.is_chain:
            uses = {id(memory): 0 for memory in own}
            for number, call in enumerate(self._found.calls):
                for index in call.arrays:
                    key = id(self._found.arrays[index].memory)
                    uses[key] = uses.get(key, 0) | 1 << number
            end = len(self._found.calls)  # when outputs are copied, behind all calls
            masks = [uses[id(memory)] | (1 << end if memory.last == end else 0) for memory in own]
            masks += [1 << number for number, _, _ in passing]
            before = [*order.before, (1 << end) - 1]
            blocks = [replace(block, uses=mask, before=_common(before, mask)) for block, mask in zip(blocks, masks)]
        arena = arrange(blocks)
        self.arena_bytes, self.least_arena_bytes = arena.nbytes, arena.bound
        places = [Place("arena", offset) for offset in arena.offsets]
        self._of |= {id(memory): place for memory, place in zip(own, places)}
        self._passing = places[len(own) :]


def _common(before: Sequence[int], uses: int) -> int:
    """The calls that are before each of some calls."""
    found = -1
    for number, some in enumerate(before):
        if uses >> number & 1:
            found &= some
    return found


def _works(found: Schedule, plans: Sequence[LaunchPlan | None], ready: Sequence[bool], sms: int) -> list[Work]:
    """What each call does to the arrays of the network; workspaces are its own."""
    works = []
    for call, plan, prepacked in zip(found.calls, plans, ready):
        accesses: list[Access] = []
        for name, index in (*call.arguments.items(), *call.outputs.items()):
            memory, writes = found.arrays[index].memory, name in call.outputs
            if memory.kind != "constant":
                accesses.append(Access(id(memory), 0, 1, writes, index if name in call.offsets else None))
                accesses += callers(memory.kind == "input", writes and memory.kind == "output")
        works.append(Work(tuple(accesses), blocks_of(plan, prepacked, sms)))
    return works


def _is_prepacked(found: Schedule, call: ScheduledCall, constants: tuple[str, ...]) -> bool:
    """Whether the constant steps of a call can run once at load: the network has constants for all that they read."""
    return bool(constants) and all(found.arrays[call.arguments[name]].memory.kind == "constant" for name in constants)
