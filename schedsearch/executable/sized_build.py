"""From an ONNX model with one open dimension to an executable for a range of its sizes."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from schedsearch.backend import CompileError, RejectedError
from schedsearch.backend.code_cache import CodeCache
from schedsearch.config import Config
from schedsearch.deadline import Deadline
from schedsearch.device import Device, open_device
from schedsearch.errors import NoRecordError, SchedsearchError, UnsupportedError, UsageError, WrongResultError, did_you_mean
from schedsearch.executable.assemble import Packing, assemble
from schedsearch.executable.kernels import FEW
from schedsearch.executable.program import ChosenKernel, Origin, Program, Reference
from schedsearch.executable.sized import BuiltBundle, SizedCode, SizedPrograms
from schedsearch.executable.sized_tune import missing_ranges, tune_groups
from schedsearch.identity import sha256_hex
from schedsearch.launch import Artifact
from schedsearch.launch_sizes import SizedData, SizedPlan
from schedsearch.network.graph import AnyNode, Constant, Network, Node, Plan, View
from schedsearch.network.indexing import ConstantIndexError
from schedsearch.network.plan import best_plan, complete
from schedsearch.processes.builder import BuiltRange
from schedsearch.processes.range_build import RangeResult, Spaces, build_shared
from schedsearch.progress import stage
from schedsearch.records.location import require_file
from schedsearch.records.lookup import Lookup
from schedsearch.records.shipped import shipped_records
from schedsearch.runtime.ahead import Recipe, compile_ahead, verifying_recipes
from schedsearch.runtime.range_kernel import stored_table
from schedsearch.target import Target
from schedsearch.template import load_template, load_templates
from schedsearch.text import counted
from schedsearch.typed import Array
from schedsearch.verification.verify import verify_once
from schedsearch.workload import MAX_SIZES, Workload, WorkloadRange

if TYPE_CHECKING:
    from schedsearch.network.costs import Costs
    from schedsearch.network.model import Loaded

Outside = Callable[[Program, Mapping[str, Constant]], Mapping[str, Reference]]  # as `references.find` for one model
_Column = Mapping[int, Workload]  # size -> what a call does for it
_Key = tuple[Workload, tuple[Workload, ...], tuple[str, Config | None, str]]  # of what was verified


class UnknownDimensionError(UnsupportedError):
    """No input has a dimension of this name. A graph whose sizes are computed may still have one inside."""


def open_shapes(loaded: Loaded, name: str) -> Callable[[int], dict[str, list[int]]]:
    """The shapes of the inputs of an ONNX file for a size of its only open dimension.

    Raises:
        UnknownDimensionError: no input has a dimension of this name.
        UsageError: there are other open ones.
    """
    declared = {
        str(value.name): [each if isinstance(each, int) else each.value for each in value.shape or ()]
        for value in loaded.model.graph.inputs
        if value.const_value is None
    }
    known = {str(each) for shape in declared.values() for each in shape if not isinstance(each, int)}
    if name not in known:
        raise UnknownDimensionError(f"no input has the dimension {name!r}{did_you_mean(name, known)}")
    if others := sorted(known - {name}):
        example = ",".join(f"{each}=1..64" for each in (name, *others))
        raise UsageError(f"{loaded.name}: dimension {others[0]!r} has no bounds; give those of all: --dynamic {example}")
    open_ones = {each: shape for each, shape in declared.items() if name in shape}
    return lambda size: {each: [size if n == name else int(n) for n in shape] for each, shape in open_ones.items()}


class SizedBuild:
    """Builds the programs of all sizes of a network.

    Args:
        network_of: makes the network of a size.
        db: of records; it may be missing unless `strict`.
        strict: refuse kernels that were not tuned for the range.
        say: takes a line about each stage.
    """

    def __init__(
        self,
        network_of: Callable[[int], Network],
        name: str,
        low: int,
        high: int,
        *,
        target: Target,
        db: str | os.PathLike[str],
        mode: str,
        strict: bool,
        model: str,
        say: Callable[[str], None],
    ) -> None:
        if not 1 <= low < high or high - low >= MAX_SIZES:
            raise UnsupportedError(
                f"{name}={low}..{high} is not possible for a table of kernels; allowed: 2 to {MAX_SIZES} sizes of 1 or more"
            )
        self._network_of, self._name, self._sizes = network_of, name, range(low, high + 1)
        self._target, self._db, self._mode = target, require_file(db), mode
        self._strict, self._model, self._say = strict, model, say
        self._arrays: dict[str, list[Array]] = {}  # name of a constant -> its arrays that differ
        self._networks: dict[int, Network] = {}
        self._made: dict[str, SizedCode] = {}
        self._of_artifact: dict[str, str] = {}  # sha256 of an artifact of one size -> that of its `SizedCode`
        self._code = CodeCache()
        self._verified: dict[_Key, dict[int, ChosenKernel]] = {}
        self._ahead: dict[str, BuiltRange] = {}  # by the name of its recipe

    def networks(self) -> Mapping[int, Network]:
        """The network of each size."""
        if not self._networks:
            stage(f"reading the networks of {counted(len(self._sizes), 'size')}")
            self._networks = {size: self._network(size) for size in self._sizes}
            self._say(f"the networks of {counted(len(self._sizes), 'size')} are read")
        return self._networks

    def tune(self, costs: Callable[[Network], Costs], layout: str, deadline: Deadline) -> None:
        """Tunes kernels that the table lacks, each for the range of its sizes where it has one; see `sized_tune`. The
        kernels that it has without that are built and verified first, however long it takes.

        Args:
            deadline: of tuning.
        """
        networks = self.networks()
        largest = networks[self._sizes[-1]]
        known = costs(largest)
        plans = self._plans(networks, lambda network: known if network is largest else costs(network), layout)
        columns = _columns(plans) + _other_implementations(networks)
        groups = missing_ranges(largest, known, columns, _range_of, self._is_tuned)
        if groups and not self._strict:  # what the table has without tuning comes first
            untuned = [column for column in _columns(plans) if (of := _range_of(column)) is None or not self._is_tuned(of)]
            with contextlib.closing(open_device(self._target)) as self._device, contextlib.suppress(UnsupportedError):
                self._build([(column, {}) for column in untuned])
        tune_groups(groups, self._db, self._target, deadline, self._mode, self._say)

    def _is_tuned(self, of_range: WorkloadRange) -> bool:
        try:
            stored_table(of_range, self._db, self._target, self._mode)
        except NoRecordError:
            return False
        return True

    def bundle(
        self, costs: Callable[[Network], Costs], layout: str, device: Device, outside: Outside | None = None
    ) -> BuiltBundle:
        """Builds everything.

        Args:
            device: verifies kernels that are built now.
            costs: of the workloads of a network, for its layout plan.
            layout: as of `best_plan`.
            outside: finds weights that stay in the model's file.

        Raises:
            NoRecordError: `strict`, and a range has no kernels.
            UnsupportedError: no kernel computes a workload.
            WrongResultError: a kernel that was built now computes wrong values.
        """
        networks, self._device = self.networks(), device
        plans = self._plans(networks, costs, layout)
        chosen = self._kernels(plans)
        texts: dict[int, Mapping[str, object]] = {}
        weights: dict[str, memoryview] = {}
        arena_bytes, packing = 0, Packing()
        references: dict[str, Reference] = {}
        for size, network in networks.items():
            kernels = chosen[size]
            made = assemble(
                network, plans[size], kernels.__getitem__, target=self._target.key, model=self._model, packing=packing
            )  # fmt: skip
            calls = [replace(call, artifact=self._of_artifact[call.artifact]) for call in made.program.calls]
            if outside is not None and not {*made.program.weights} <= weights.keys():
                references |= outside(made.program, network.all_constants)
            kept = {each: references[each] for each in made.program.weights if each in references}
            texts[size] = json.loads(replace(made.program, calls=tuple(calls), references=kept).json)
            weights |= dict(zip(made.program.weights, made.weights))
            arena_bytes = max(arena_bytes, made.program.arena_bytes)
        programs = tuple(_sized(texts))
        used = {self._of_artifact[each.artifact.sha256] for kernels in chosen.values() for each in kernels.values()}
        table = SizedPrograms(
            self._target.key, self._model, self._name, self._sizes[0], self._sizes[-1], programs, arena_bytes
        )  # fmt: skip
        return BuiltBundle(table, {sha256: self._made[sha256] for sha256 in sorted(used)}, weights, references)

    def _network(self, size: int) -> Network:
        """The network of a size. Its constants are the very arrays of other sizes that are equal: a model's weights are in
        memory once."""
        try:
            network = self._network_of(size)
        except ConstantIndexError as error:
            raise ConstantIndexError(
                f"at {self._name} = {size}: {error}, or give {self._name} a range of larger sizes"
            ) from error

        def shared(constants: Mapping[str, Constant]) -> dict[str, Constant]:
            return {name: replace(each, array=self._shared(name, each.array)) for name, each in constants.items()}

        return replace(network, constants=shared(network.constants), fixed=shared(network.fixed))

    def _shared(self, name: str, array: Array) -> Array:
        known = self._arrays.setdefault(name, [])
        for each in known:
            if each.dtype == array.dtype and each.strides == array.strides and np.array_equal(each, array):
                return each
        known.append(array)
        return array

    def _plans(self, networks: Mapping[int, Network], costs: Callable[[Network], Costs], layout: str) -> dict[int, Plan]:
        """The plan of the largest size for all sizes whose network has the same form, so that they share packed weights."""
        largest = networks[self._sizes[-1]]
        plan = best_plan(largest, costs(largest), layout)
        numbers = {node.name: _number(node, plan) for node in largest.nodes}
        form = _form(largest)
        return {
            size: complete(network, numbers) if _form(network) == form else best_plan(network, costs(network), layout)
            for size, network in networks.items()
        }

    def _kernels(self, plans: Mapping[int, Plan]) -> dict[int, dict[Workload, ChosenKernel]]:
        """The kernel of each workload of each size."""
        distinct = _columns(plans)
        served = [self._tuned(column) for column in distinct]
        tuned = sum(map(bool, served))
        self._build([(column, kernels) for column, kernels in zip(distinct, served) if not kernels])
        found: dict[int, dict[Workload, ChosenKernel]] = {size: {} for size in plans}
        for column, kernels in zip(distinct, served):
            for size, chosen in kernels.items():
                found[size][column[size]] = chosen
        sizes = f"{self._name} = {self._sizes[0]} to {self._sizes[-1]}"
        self._say(f"{counted(len(distinct), 'different kernel')} for {sizes}, {tuned} of them tuned for the range")
        return found

    def _tuned(self, column: Mapping[int, Workload]) -> dict[int, ChosenKernel]:
        """The kernels of a tuned range; {} without one."""
        of_range = _range_of(column)
        if of_range is None or not self._db.exists():
            if self._strict:
                raise NoRecordError(_untuned(column, self._name))
            return {}
        try:
            table = stored_table(of_range, self._db, self._target, self._mode)
        except NoRecordError as error:
            if self._strict:
                raise NoRecordError(_untuned(column, self._name)) from error
            return {}
        found = {}
        for size in column:
            kernel = table.kernel_for(size)
            origin = Origin("exact", kernel.template, kernel.config.json, kernel.times_ns.get(size))
            found[size] = self._keep(SizedCode(kernel.code, kernel.plan), size, origin)
        return found

    def _keep(self, code: SizedCode, size: int, origin: Origin) -> ChosenKernel:
        artifact = Artifact(code.code, code.plan.at(size))
        self._made[code.sha256] = code
        self._of_artifact[artifact.sha256] = code.sha256
        return ChosenKernel(artifact, origin)

    def _build(self, wanted: Sequence[tuple[_Column, dict[int, ChosenKernel]]]) -> None:
        """Compiles kernels now, from recorded configurations where there are some, else from default ones. Each is verified
        at both ends of what it serves.

        Args:
            wanted: columns, and where their kernels go.
        """
        while open_ones := [(column, found) for column, found in wanted if len(found) < len(column)]:
            largest = [max(size for size in column if size not in found) for column, found in open_ones]
            self._compile_ahead([column for column, _ in open_ones], largest)
            for (column, found), size in zip(open_ones, largest):
                found |= self._built(column, [each for each in column if each not in found], size)

    def _compile_ahead(self, columns: Sequence[_Column], sizes: Sequence[int]) -> None:
        """Compiles the first way of each column for a size of it, and what verifies it, in a process for each core."""
        recipes: list[Recipe[Any]] = []
        for column, size in zip(columns, sizes):
            if way := next(self._ways(column[size]), None):
                recipes.append(_recipe(column, way[0], way[1], size))
                for end in dict.fromkeys((min(column), size)):
                    recipes += verifying_recipes(column[end], self._target)
        built = compile_ahead(recipes, self._code, self._target) if len(columns) > FEW else {}
        self._ahead |= {name: made for name, made in built.items() if isinstance(made, BuiltRange)}

    def _built(self, column: _Column, left: Sequence[int], size: int) -> dict[int, ChosenKernel]:
        """A kernel for `size` and for those of the sizes `left` that it serves. It is verified once, unless there is a new
        record."""
        ways, why = list(self._ways(column[size])), []
        key = column[size], tuple(column[each] for each in left), ways[0]
        if key in self._verified:
            return self._verified[key]
        stage(f"compiling and verifying {column[size].label}")
        for template, config, level in ways:
            try:
                code, built = self._shared_code(column, template, config, size)
                served = [each for each in left if each in code.plan.sizes]
                if size not in served:
                    raise UnsupportedError(f"its machine code cannot be launched for {self._name} = {size}")
                for end in dict.fromkeys((served[0], served[-1])):
                    self._verify(column[end], code, end)
            except SchedsearchError as error:
                why.append(f"{template}: {error}")
                continue
            origin = Origin(level, template, built.json)
            found = self._verified[key] = {each: self._keep(code, each, origin) for each in served}
            return found
        raise UnsupportedError(f"no kernel on {self._target.name} for {column[size].label}: {'; '.join(why)}")

    def _ways(self, workload: Workload) -> Iterator[tuple[str, Config | None, str]]:
        """Templates with configurations: that of the best record and the shipped one, then the default of each template."""
        if self._db.exists():
            with Lookup(self._db) as lookup:
                row = lookup.exact(workload.id, self._target.key, self._mode)
            if row is not None:
                yield row.template, Config.from_json(row.config_json), "nearest"
        shipped = shipped_records(self._target.key).exact(workload.id, self._target.key, self._mode)
        if shipped is not None:
            yield shipped.template, Config.from_json(shipped.config_json), "shipped"
        for template in load_templates().matching(workload, self._target):
            yield template.name, None, "default"

    def _shared_code(self, column: _Column, template: str, config: Config | None, origin: int) -> tuple[SizedCode, Config]:
        """The machine code of a configuration for all sizes that share it with `origin`, and the configuration."""
        recipe = _recipe(column, template, config, origin)
        if ahead := self._ahead.get(recipe.name):
            return SizedCode(ahead.artifact.code, ahead.plan), ahead.config
        if refusal := self._code.refusal(recipe.name):
            raise UnsupportedError(refusal)
        try:
            built = recipe.make(self._target)
        except (CompileError, RejectedError) as error:
            raise UnsupportedError(str(error)) from error
        return SizedCode(built.result.artifact.code, SizedPlan.from_json(built.plan)), Config(built.config)

    def _verify(self, workload: Workload, code: SizedCode, size: int) -> None:
        kernel = self._device.load(Artifact(code.code, code.plan.at(size)))
        try:
            if problem := verify_once(self._device, workload, kernel, self._code):
                raise WrongResultError(f"the kernel computes wrong values for {workload.label}: {problem}")
        except RejectedError as error:  # of what verifies it, which another process could not compile
            raise UnsupportedError(f"the kernel cannot be verified here: {error}") from error
        finally:
            kernel.close()


def _recipe(column: _Column, template: str, config: Config | None, origin: int) -> Recipe[RangeResult]:
    """The machine code of a configuration, or of the default one, for all sizes that share it with `origin`."""
    text = json.dumps([config and config.json, origin, [each.id for each in column.values()]])
    return Recipe(
        f"{template} range {sha256_hex(text)}", functools.partial(_build_range, template, dict(column), config, origin)
    )


def _build_range(template: str, column: _Column, config: Config | None, origin: int, target: Target) -> RangeResult:
    loaded = load_template(template)
    spaces = Spaces(loaded, column.__getitem__, target)
    return build_shared(loaded, column, spaces, target, config, origin)


def _columns(plans: Mapping[int, Plan]) -> list[_Column]:
    """What the calls of all sizes do, each different one once."""
    columns: dict[tuple[str, ...], dict[int, Workload]] = {}  # what a call does -> size -> its workload
    for size, plan in plans.items():
        for name, workload in plan.implementations.items():
            columns.setdefault((name, workload.op), {})[size] = workload
        for step in plan.conversions:
            columns.setdefault((step.value, step.x, step.y), {})[size] = step.workload
    return list({tuple((size, each.id) for size, each in column.items()): column for column in columns.values()}.values())


def _other_implementations(networks: Mapping[int, Network]) -> list[_Column]:
    """All implementations of all nodes, of networks that have the form of the largest."""
    largest = networks[max(networks)]
    form = _form(largest)
    alike = {size: network for size, network in networks.items() if _form(network) == form}
    return [
        {
            size: node.implementations[number]
            for size, network in alike.items()
            if isinstance(node := network.nodes[place], Node)
        }
        for place, first in enumerate(largest.nodes)
        if isinstance(first, Node)
        for number in range(len(first.implementations))
    ]


def _number(node: AnyNode, plan: Plan) -> int:
    """The number of the implementation, or of the pair of layouts, that a plan took for a node."""
    if isinstance(node, Node):
        return node.implementations.index(plan.implementations[node.name])
    return node.layouts.index(plan.views[node.name]) if isinstance(node, View) else 0


def _form(network: Network) -> list[object]:
    """What networks of several sizes must have in common so that one plan is for all."""
    return [
        (node.name, [[spec.axes for _, spec in node.layouts(each)] for each in node.implementations])
        if isinstance(node, Node)
        else (node.name, node.layouts if isinstance(node, View) else "")
        for node in network.nodes
    ]


def _range_of(column: Mapping[int, Workload]) -> WorkloadRange | None:
    """The range that the workloads of a column are, if one size of theirs is the open dimension."""
    low, high = min(column), max(column)
    names = [each for each, value in column[high].params.items() if value != column[low].params.get(each)]
    if len(names) != 1:
        return None
    try:
        of_range = column[high].with_dynamic(names[0], *(column[end].params[names[0]] for end in (low, high)))
        return of_range if all(of_range.at(size) == column[size] for size in column) else None
    except UsageError:
        return None


def _untuned(column: Mapping[int, Workload], name: str) -> str:
    return (
        f"no kernels were tuned for the range {name} = {min(column)} to {max(column)} of {column[max(column)].label}; tune "
        "it (build --dynamic ... --tune 10m), or build without --strict, which takes default configurations"
    )


def _sized(texts: Mapping[int, Mapping[str, object]]) -> Iterator[SizedData]:
    """As few objects as possible that have the programs of all sizes."""
    groups: list[dict[int, Mapping[str, object]]] = []
    for size, text in texts.items():
        for group in groups:
            if SizedData.alike(text, next(iter(group.values()))):
                group[size] = text
                break
        else:
            groups.append({size: text})
    return (SizedData.between(group) for group in groups)
