"""The tests that every template must pass. A test class for a template subclasses `TemplateContract` and sets its
attributes.

::

    class TestPointwise(TemplateContract):
        template = Conv2d1x1Cpu()
        target = detect("cpu")
        accepted = (schedsearch.conv2d(n=1, h=8, w=8, c=16, k=24, r=1, s=1, dtype="float32"),)
        refused = ((schedsearch.conv2d(n=1, h=8, w=8, c=16, k=24, r=3, s=3, dtype="float32"), "r"),)
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest

from schedsearch.backend import compile_source, compilers
from schedsearch.config import Config
from schedsearch.launch import MAX_BLOCK_THREADS, Pointer, Scalar, TensorMap
from schedsearch.space import ConfigSpace
from schedsearch.target import Target
from schedsearch.template import KernelSource, Template
from schedsearch.workload import Workload


class TemplateContract:
    """The tests do not need the template's device: they make and compile kernels, but do not run them.

    Attributes:
        template: the template under test.
        target: the target of its kernels; a preset of `schedsearch.target.PRESETS` suffices.
        accepted: workloads that it must take.
        refused: workloads that it must refuse, each with a word that the reason has to contain.
        samples: how many random configurations of each workload get a kernel.
        compiled: how many configurations are compiled in all: the default of the first accepted workload, then random ones
            of the accepted workloads in turn, beginning with the second.
    """

    template: ClassVar[Template]
    target: ClassVar[Target]
    accepted: ClassVar[Sequence[Workload]]
    refused: ClassVar[Sequence[tuple[Workload, str]]] = ()
    samples: ClassVar[int] = 10
    compiled: ClassVar[int] = 2

    def spaces(self) -> list[tuple[Workload, ConfigSpace]]:
        """The accepted workloads with their spaces."""
        return [(workload, self.template.space(workload, self.target)) for workload in self.accepted]

    def candidates(self) -> list[tuple[Workload, Config]]:
        """The default of every accepted workload, and random configurations."""
        rng = np.random.default_rng(0)
        return [
            (workload, config)
            for workload, space in self.spaces()
            for config in [self.template.default(workload, self.target, space), *space.sample(self.samples, rng)]
        ]

    def test_it_says_what_it_is(self) -> None:
        assert self.template.name.isidentifier() and self.template.version >= 1
        assert self.template.kind == self.target.kind
        assert {workload.op for workload in self.accepted} == set(self.template.ops)

    def test_it_takes_what_it_should(self) -> None:
        assert [reason for workload in self.accepted if (reason := self.template.validate(workload, self.target))] == []

    def test_a_refusal_is_one_sentence_about_what_is_wrong(self) -> None:
        for workload, word in self.refused:
            reason = self.template.validate(workload, self.target)
            assert reason is not None, f"it takes {workload.label}"
            assert word in reason and "\n" not in reason, reason

    def test_the_default_is_legal(self) -> None:
        for workload, space in self.spaces():
            assert space.check(self.template.default(workload, self.target, space)) == [], workload.label

    def test_every_knob_is_documented(self) -> None:
        for _, space in self.spaces():
            assert [knob.name for knob in space.knobs if not knob.doc] == []

    def test_features_are_finite(self) -> None:
        for workload, space in self.spaces():
            rows = space.sample_indices(self.samples, np.random.default_rng(0))
            assert np.isfinite(space.encode(rows)).all(), workload.label

    def test_a_kernel_names_what_the_workload_has(self) -> None:
        """Buffers are arguments, outputs or workspaces, and optional ones may be absent; scalars are the workload's."""
        for workload, config in self.candidates():
            source = self.template.kernel(workload, self.target, config)
            buffers = {spec.name for spec in (*workload.signature, *workload.outputs)} | set(source.workspaces)
            named = [param for step in source.steps for param in step.params]
            needed = [
                param
                for param in named
                if isinstance(param, TensorMap) or (isinstance(param, Pointer) and not param.optional)
            ]
            assert {param.buffer for param in needed} <= buffers
            assert {param.name for param in named if isinstance(param, Scalar)} <= {s.name for s in workload.scalars}
            assert set(source.alignments) <= buffers
            assert source.kind == self.template.kind

    def test_a_kernel_stays_within_the_limits_of_the_device(self) -> None:
        for workload, config in self.candidates():
            for step in self.template.kernel(workload, self.target, config).steps:
                step.grid.blocks(self.target.sms, step.cluster)  # raises beyond the limit of a grid
                assert step.block_threads >= 1
                if self.template.kind == "cuda":
                    assert step.block_threads <= MAX_BLOCK_THREADS, config
                    assert step.dynamic_shared_bytes <= self.target.shared_bytes_per_block, config

    def test_the_same_configuration_gives_the_same_launch(self) -> None:
        """Also after pickling the template, because builders get a copy."""
        again: Template = pickle.loads(pickle.dumps(self.template))
        for workload, config in self.candidates():
            assert _launch(again.kernel(workload, self.target, config)) == _launch(
                self.template.kernel(workload, self.target, config)
            )

    def test_candidates_compile(self) -> None:
        """Needs the compiler of the template's kind, but no device. A rejected kernel (spills, ...) fails, too."""
        if self.template.kind == "cuda" and (problem := compilers.chosen().problem()):
            pytest.skip(problem)
        rng = np.random.default_rng(1)
        for number, (workload, space) in zip(range(self.compiled), itertools.cycle(self.spaces())):
            config = space.sample(1, rng)[0] if number else self.template.default(workload, self.target, space)
            built = compile_source(self.template.kernel(workload, self.target, config), self.target)
            assert built.artifact.code and built.resources.spill_bytes == 0, f"{workload.label} with {config}"


def _launch(source: KernelSource) -> object:
    steps = [
        (step.params, step.grid, step.block_threads, step.dynamic_shared_bytes, step.cluster, step.function.__code__)
        for step in source.steps
    ]
    return source.arch, steps, dict(source.workspaces), dict(source.alignments)
