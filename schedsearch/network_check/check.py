"""Compares a network with the model that it was made from, once, when it is built.

Every value that the network computes and the model names is compared on its own: the nodes of the model between it and the
nearest values before it that the network computes, too, run on the network's own numbers. So no error of one layer hides
that of another, a choice such as an argmax is judged on the numbers that it chose from, and the first difference names the
node. A value that differs may also be another one under the same name, as rewriting left it; then it is taken out, and what
depends on it decides: the network's further values must be right without it, and wrong if it were the model's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import TensorProto

from schedsearch.errors import (
    BranchError,
    DeviceError,
    IndexRangeError,
    SubgraphError,
    UsageError,
    WrongNetworkError,
    first_line,
)
from schedsearch.executable.turns import TurnsError, limited_turns
from schedsearch.network.settings import as_given
from schedsearch.network_check.branches import candidates
from schedsearch.network_check.draws import KINDS, Wanted, drawn
from schedsearch.network_check.evaluators import (
    MOST_PRODUCTS,
    Evaluator,
    NotEvaluableError,
    OnnxReference,
    evaluators,
    products,
)
from schedsearch.network_check.known_faults import LOSES_NAN
from schedsearch.network_check.rule import Difference, difference, surely_equal
from schedsearch.network_check.settings import settings_of
from schedsearch.network_check.source import Piece, Source
from schedsearch.network_check.subjects import NO_CHECK, Subject, subjects_of
from schedsearch.network_check.unspecified import STAND_INS
from schedsearch.typed import Array

if TYPE_CHECKING:
    from schedsearch.executable.net import Net

_NOISE = ((1.0, 0.0), (-1.0, 0.0), (0.0, 1.0))  # direction and chance
_MOST_TURNS = 10_000  # of a loop, as of those that become nodes
_MOST_ELEMENTS = 1 << 26  # of values that are compared together; the memory of the check is a few times theirs
_INSTALL = "pip install onnxruntime to have the network compared with it"
SHARE = 0.2
"""Of the time of a build, that more than one comparison may take."""


def check(net: Net, source: Source, started: float, say: Callable[[str], None]) -> str:
    """Compares a network with its model: one of several sizes at the smallest, the largest and sizes between, and one of
    computed sizes in both modes; see `Checker.check`. Returns what computed the model; "" if nothing did."""
    checker = Checker(source, say, started)
    with limited_turns(_MOST_TURNS):
        return checker.name if all(map(checker.check, subjects_of(net))) else ""


@dataclass
class Checker:
    """Attributes:
    say: takes lines about the check.
    started: `time.monotonic()` when the build began.
    """

    source: Source
    say: Callable[[str], None]
    started: float

    def __post_init__(self) -> None:
        self._evaluators = evaluators()
        self.name = self._evaluators[0].name
        self._settings, self._unset = settings_of(self.source)
        self._without_onnx_runtime = isinstance(self._evaluators[0], OnnxReference)

    def check(self, subject: Subject) -> bool:
        """Compares a network on inputs drawn from a seed.

        Returns:
            Whether it did: not if ONNX Runtime is missing and onnx's evaluator cannot run the model or would take too long,
            or if no index that was drawn is in range; it says so.

        Raises:
            WrongNetworkError: the network computes something else than its model.
            UsageError: neither ONNX Runtime nor onnx's evaluator can run the model.
        """
        if self._without_onnx_runtime:
            needed = products(self.source.shapes, self.source.model)
            if needed > MOST_PRODUCTS:
                self.say(
                    f"unchecked: {self.source.name} needs {needed:,} products, too many for onnx's evaluator; {_INSTALL}"
                )
                return False
        began = time.monotonic()
        build_s = began - self.started
        for number, kind in enumerate(KINDS):
            if number and 2 * (time.monotonic() - began) > max(1.0, SHARE * build_s):
                break
            if not self._on(subject, kind):
                return False
        self._take_branches(subject)
        return True

    def _compare(self, subject: Subject, inputs: Mapping[str, Array], wanted: Sequence[Wanted]) -> None:
        """Compares a network on inputs, or on others like these if they take a branch that cannot be computed.

        Raises:
            BranchError: all that were tried take such a branch.
            WrongNetworkError, NotEvaluableError, IndexRangeError
        """
        try:
            _Comparison(self.source, subject, inputs, self._evaluators, self.say).run()
        except BranchError:
            for each in candidates(wanted, inputs, self.source.model):
                with contextlib.suppress(BranchError):
                    _Comparison(self.source, subject, each, self._evaluators, self.say).run()
                    return
            raise

    def _wanted(self, subject: Subject) -> list[Wanted]:
        """The inputs of a network: with 0 and 1 for truth values, which a network has as bytes, and settings as they are."""
        found = list(subject.inputs)
        for name, each in zip(self.source.inputs, _by_place(subject.inputs, self.source)):
            truth = self.source.dtypes.get(name) == TensorProto.BOOL
            found[found.index(each)] = replace(each, below=2 if truth else each.below, value=self._settings.get(name))
        return found

    def _take_branches(self, subject: Subject) -> None:
        """Compares a network on inputs that take branches that no run has taken, as far as some are found. It says which
        are left."""
        wanted = self._wanted(subject)
        left = subject.untaken()
        for inputs in candidates(wanted, drawn(wanted, KINDS[0], 0), self.source.model) if left else ():
            try:
                subject.outputs(inputs)
                if len(subject.untaken()) < len(left):
                    _Comparison(self.source, subject, inputs, self._evaluators, self.say).run()
            except (BranchError, IndexRangeError, NotEvaluableError, TurnsError):
                continue
            left = subject.untaken()
            if not left:
                break
        if left:
            self.say(f"not compared: {', '.join(left)}, which no inputs that were tried take")

    def _on(self, subject: Subject, kind: str) -> bool:
        """Whether the network was compared."""
        reasons: list[Exception] = []
        wanted = self._wanted(subject)
        takes_integers = any("int" in each.dtype for each in subject.inputs)
        for small in (False, True):
            inputs = drawn(wanted, kind, 0, small=small)
            try:
                self._compare(subject, inputs, wanted)
                return True
            except DeviceError as error:
                if self._unset:
                    self._say_unset(subject, error)
                    return False
                if not (takes_integers and isinstance(error, SubgraphError)):
                    raise
                reasons.append(error)  # they may be places, and ONNX Runtime looks whether these are in range
            except (BranchError, IndexRangeError, NotEvaluableError, TurnsError) as error:
                reasons.append(error)
                if not takes_integers:
                    break
        why = first_line(reasons[-1])
        if isinstance(reasons[-1], BranchError | IndexRangeError | SubgraphError | TurnsError):
            self.say(f"unchecked: {subject.what} was not compared with {self.source.name}: {why}")
            return False
        if self._without_onnx_runtime:
            self.say(f"unchecked: onnx's evaluator cannot run {self.source.name} ({why}); {_INSTALL}")
            return False
        raise UsageError(
            f"{subject.what} cannot be compared with {self.source.name}: {why}; build it unchecked with {NO_CHECK}"
        )

    def _say_unset(self, subject: Subject, error: DeviceError) -> None:
        names = self._unset
        self.say(
            f"unchecked: {subject.what} was not compared with {self.source.name}: no value was found for "
            f"{', '.join(map(repr, names))} that makes the declared shapes ({first_line(error)}). To have it compared, give "
            f"a value: {as_given(names)}"
        )


class _Comparison:
    """On one set of inputs."""

    def __init__(
        self,
        source: Source,
        subject: Subject,
        inputs: Mapping[str, Array],
        evaluators: Sequence[Evaluator],
        say: Callable[[str], None],
    ) -> None:
        self._subject, self._say = subject, say
        self._evaluators = evaluators
        self._inputs = dict(zip(source.inputs, (inputs[each.name] for each in _by_place(subject.inputs, source))))
        self._outputs = dict(zip(source.outputs, subject.outputs(inputs)))
        self._drawn = inputs
        self._source = source = source.decided(self._decide)
        common = [
            name for name in subject.sizes if name in source.made_by and name not in source.random and name in source.dtypes
        ]
        self._common = sorted(common, key=source.places.__getitem__)

    def _decide(self, source: Source, names: Sequence[str]) -> dict[str, Array]:
        """What values of the model are: as the network found them, where it shows that, since it goes on from there."""
        shown = {name for name in names if name in self._subject.sizes}
        found = self._subject.values(self._drawn, shown) if shown else {}
        if left := [name for name in names if name not in shown]:
            piece = source.piece(left, (), False)
            found = {**found, **dict(zip(left, self._computed(piece)))}
        return dict(found)

    def _computed(self, piece: Piece) -> list[Array]:
        """What a piece gives for the inputs. Raises NotEvaluableError if no evaluator can run it."""
        reasons = []
        for evaluator in self._evaluators:
            try:
                return evaluator.open(piece.model).run(piece.feeds(self._inputs))
            except NotEvaluableError as error:
                reasons.append(str(error))
        raise NotEvaluableError("; ".join(reasons))

    def run(self) -> None:
        """Raises WrongNetworkError or NotEvaluableError."""
        outputs = set(self._outputs)
        first = found = self._differences(frozenset(self._common))
        apart: set[str] = set()
        while found:
            new = set(found) - outputs - apart
            if not new and set(found) <= outputs:
                before = self._ancestors(set(found))
                name = next((each for each in first if each in before), next(iter(found)))
                raise self._error(name, first.get(name) or found[name])
            apart |= new
            found = self._differences(
                frozenset(each for each in self._common if each not in apart or each in outputs), apart
            )
        for name, each in first.items():
            if each.is_gross and not self._is_another(name, frozenset(self._common) - apart):
                raise self._error(name, each)

    def _is_another(self, name: str, right: frozenset[str]) -> bool:
        """Whether a value of the network that differs is another one than the model's of this name: what depends on it would
        be another, too, if it were the model's. A wrong value may change nothing that is compared, as behind a mask.

        Args:
            right: values that do not differ.
        """
        given = right | {name}
        after = [each for each in (*sorted(right, key=self._source.places.__getitem__), *self._outputs) if each != name]
        readers = [each for each in dict.fromkeys(after) if name in self._source.reads_before(each, given)]
        try:
            return not readers or bool(self._group(readers, given))
        except NotEvaluableError:  # the model cannot go on from it, such as from another shape
            return True

    def _differences(self, given: frozenset[str], apart: Collection[str] = ()) -> dict[str, Difference]:
        """Values that differ, in the model's order."""
        given = given - set(apart)
        found: dict[str, Difference] = {}
        for names in self._groups(given):
            found |= self._group(names, given)
        return {name: found[name] for name in sorted(found, key=lambda each: self._source.places.get(each, -1))}

    def _groups(self, given: frozenset[str]) -> Iterator[list[str]]:
        names = [*(each for each in self._common if each in given and each not in self._outputs)]
        names += [each for each in self._outputs if each not in self._source.random]
        group: list[str] = []
        total = 0
        for name in names:
            size = self._subject.sizes[name] if name in self._subject.sizes else self._outputs[name].size
            if group and total + size > _MOST_ELEMENTS:
                yield group
                group, total = [], 0
            group.append(name)
            total += size
        if group:
            yield group

    def _group(self, names: list[str], given: frozenset[str]) -> dict[str, Difference]:
        clean = self._source.piece(names, given, False)
        wanted = {*clean.takes, *names} & {*self._subject.sizes}
        shown = self._subject.values(self._drawn, wanted) if wanted else {}
        values = {**shown, **self._inputs}
        own_values = shown | self._outputs
        known = self._right(clean, values)
        # Runs with noise take most of the time of a check, so only values in doubt have them. One with noise of one sign,
        # which is mostly the largest, decides about nearly all of these.
        doubtful = [*names]
        if known is not None:
            roundoffs = {name: self._source.roundoff(name) for name in names}
            doubtful = [name for name in names if not surely_equal(own_values[name], known[name], roundoffs[name])]
        if doubtful:
            right, (noisy,) = self._evaluated(doubtful, given, values, known, _NOISE[:1])
            doubtful = [name for name in doubtful if not surely_equal(own_values[name], right[name], noisy=noisy[name])]
        if not doubtful:
            return {}
        right, others = self._evaluated(doubtful, given, values, known, _NOISE)
        found: dict[str, Difference] = {}
        for name in doubtful:
            own = own_values[name]
            ops = self._source.ops_before(name, given)
            options: dict[str, Any] = {"dtype": self._subject.dtype(name), "without_nan": bool(ops & LOSES_NAN)}
            noise = [each[name] for each in others]
            if self._source.may_be_unspecified(name, given):
                options["unspecified"] = self._unspecified(name, given, values)
            apart = difference(own, right[name], noise, **options)
            if apart is not None and not self._other_agrees(name, own, given, values, noise, options):
                found[name] = apart
        return found

    def _right(self, clean: Piece, values: Mapping[str, Array]) -> dict[str, Array] | None:
        """The values of a piece by the first evaluator; None if it cannot run it."""
        try:
            return dict(zip(clean.wanted, self._evaluators[0].open(clean.model).run(clean.feeds(values))))
        except NotEvaluableError:
            return None

    def _evaluated(
        self,
        names: Sequence[str],
        given: frozenset[str],
        values: Mapping[str, Array],
        known: Mapping[str, Array] | None,
        noises: Sequence[tuple[float, float]],
    ) -> tuple[Mapping[str, Array], list[dict[str, Array]]]:
        """Some values of the model, and these with noise, by the first evaluator that can run both.

        Args:
            known: what the first evaluator found, if it could run the model without noise.
            noises: direction and chance of each run with noise.
        """
        noisy = self._source.piece(names, given, True)
        reasons = []
        for place, evaluator in enumerate(self._evaluators):
            try:
                right = known
                if place or right is None:
                    clean = self._source.piece(names, given, False)
                    right = dict(zip(names, evaluator.open(clean.model).run(clean.feeds(values))))
                opened = evaluator.open(noisy.model)
                return right, [dict(zip(names, opened.run(noisy.feeds(values, noise)))) for noise in noises]
            except NotEvaluableError as error:
                reasons.append(str(error))
        raise NotEvaluableError("; ".join(reasons))

    def _unspecified(self, name: str, given: frozenset[str], values: Mapping[str, Array]) -> Array | None:
        """Which elements of a value depend on what ONNX leaves open; None if no evaluator can run the model for it."""
        pieces = [self._source.piece([name], given, False, number) for number in range(STAND_INS)]
        for evaluator in self._evaluators:
            try:
                first, *others = [evaluator.open(each.model).run(each.feeds(values))[0] for each in pieces]
            except NotEvaluableError:
                continue
            if any(each.shape != first.shape for each in others):
                return np.ones(first.shape, bool)
            found: Array = np.any([(each != first) & ((each == each) | (first == first)) for each in others], axis=0)
            return found
        return None

    def _other_agrees(
        self,
        name: str,
        own: Array,
        given: frozenset[str],
        values: Mapping[str, Array],
        noise: Sequence[Array],
        options: Mapping[str, Any],
    ) -> bool:
        """Whether the other evaluator, from the same constants, has the network's numbers: then ONNX Runtime is wrong."""
        if len(self._evaluators) < 2 or own.size > _MOST_ELEMENTS >> 6:
            return False
        constants = self._source.constants_before(name, given)
        try:
            known = {}
            if constants:
                piece = self._source.piece(constants, (), False)
                known = dict(zip(constants, self._evaluators[0].open(piece.model).run(piece.feeds(self._inputs))))
            piece = self._source.piece([name], given | set(constants), False)
            if products(self._source.shapes, piece.model) > MOST_PRODUCTS:
                return False
            (right,) = self._evaluators[1].open(piece.model).run(piece.feeds({**values, **known}))
        except NotEvaluableError:
            return False
        if difference(own, right, noise, **options) is not None:
            return False
        self._say(
            f"{self._source.describe(name)}: {self._evaluators[0].name} and {self._evaluators[1].name} differ, and the "
            "network has the numbers of the latter"
        )
        return True

    def _ancestors(self, names: set[str]) -> set[str]:
        """Values that these are computed from, and these."""
        found, left = set(names), list(names)
        while left:
            for read in self._source.reads(left.pop()):
                if read not in found:
                    found.add(read)
                    left.append(read)
        return found

    def _error(self, name: str, apart: Difference) -> WrongNetworkError:
        node = self._source.describe(name)
        return WrongNetworkError(self._subject.complaint(f"{name!r}{node and f', of {node}'}", apart, self._source.name))


def _by_place(inputs: Sequence[Wanted], source: Source) -> list[Wanted]:
    """The inputs of the network that are those of the model, by name, or else by place."""
    by_name = {each.name: each for each in inputs}
    if all(name in by_name for name in source.inputs):
        return [by_name[name] for name in source.inputs]
    return list(inputs)
