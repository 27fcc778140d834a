"""`schedsearch space`, `templates` and `workload-schema`: show what is available, without compiling or measuring."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING

import click

from schedsearch.cli import render
from schedsearch.cli.options import CARDS, AtLeast, kernels_option
from schedsearch.errors import ConfigError, UsageError, did_you_mean
from schedsearch.typed import JsonObject

if TYPE_CHECKING:
    from schedsearch.session.plan import ArmPlan, TaskPlan
    from schedsearch.target import Target
    from schedsearch.workload_file import WorkloadFile

TARGET_HELP = f"auto, cpu, cuda or cuda:N; also {CARDS} without such a card."


def resolve(workload_file: str, selector: str | None, kernel_files: tuple[str, ...] = ()) -> tuple[WorkloadFile, Target]:
    """A workload file and its device, which may be one of `PRESETS`."""
    from schedsearch.cli.tune import load_tasks
    from schedsearch.device.detect import detect

    file = load_tasks(workload_file, kernel_files=kernel_files, selector=selector)
    target = detect(selector or file.target, presets=True)
    return file.resolve(target), target


def make_one(file: WorkloadFile, selector: str | None, mode: str, db: object) -> str:
    """How to make the records of a workload file that a database lacks, for the end of a message.

    Args:
        file: has its own target and mode, which the command need not name.
        selector: --target as it was given; the name of one of `PRESETS` need not be a card of this machine.
        mode: the timing mode of the records.
        db: the database.
    """
    from schedsearch.target import PRESETS

    there = " on a machine with that card" if selector in PRESETS else ""
    target = "cuda" if there else selector
    option = "" if target in (None, file.target) else f" --target {shlex.quote(str(target))}"
    option += "" if mode == file.measure.mode else f" --mode {mode}"
    return f"make one{there}: schedsearch tune {shlex.quote(file.path)}{option} --db {shlex.quote(str(db))}"


@click.command()
@click.argument("workload_file", metavar="WORKLOAD.yaml", type=click.Path())
@click.option("--target", "selector", metavar="TARGET", help=TARGET_HELP)
@kernels_option
@click.option("--task", metavar="N", type=AtLeast(1), help="Only the N-th task of the file, from 1.")
@click.option("--template", metavar="NAME", help="Only this template.")
@click.option("--samples", metavar="N", type=AtLeast(0), default=3, help="Show random configurations.")
@click.option("--seed", metavar="N", type=AtLeast(0), default=0, help="Seed of the samples.")
@click.option("--config", metavar="JSON", help="Say whether this configuration is legal, and why not, e.g. '{\"bm\": 64}'.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def space(
    workload_file: str,
    selector: str | None,
    kernel_files: tuple[str, ...],
    task: int | None,
    template: str | None,
    samples: int,
    seed: int,
    config: str | None,
    as_json: bool,
) -> None:
    """Show the knobs of each task's templates, how many configurations are legal, and some of them.

    With --config it exits with 2 if no template takes the configuration.
    """
    from schedsearch.cli.tune import plan

    file, target = resolve(workload_file, selector, kernel_files)
    plans = plan(file, target)
    if task is not None and task > len(plans):
        raise UsageError(f"there is no --task {task}; the file has {len(plans)} tasks, counted from 1")
    chosen = [(i, each) for i, each in enumerate(plans, 1) if task in (None, i)]
    known = {arm.template.name for _, each in chosen for arm in each.arms}
    if template is not None and template not in known:
        raise UsageError(
            f"template {template!r} fits no task{did_you_mean(template, known)}; these do: {', '.join(sorted(known))}"
        )
    arms = [(i, each, arm) for i, each in chosen for arm in each.arms if template in (None, arm.template.name)]
    if config is not None:
        _check_config(config, arms, as_json)
        return
    described = [_describe(i, file.tasks[i - 1].name, each, arm, samples, seed) for i, each, arm in arms]
    if as_json:
        render.echo_json({"target": target.key, "spaces": described})
        return
    for entry in described:
        label = "" if entry["label"] == entry["name"] else f" ({entry['label']})"
        render.say(f"task {entry['task']}: {entry['name']}{label}, template {entry['template']}, {entry['size']} legal")
        knobs = [(knob["name"], knob["doc"], " ".join(map(str, knob["values"])), knob["default"]) for knob in entry["knobs"]]
        render.say(render.table(("knob", "meaning", "values", "default"), knobs))
        for sample in entry["samples"]:
            render.say(f"  {render.config_text(sample)}")
        for rule in entry["constraints"]:
            render.say(f"  rule: {rule}")
        render.say()


def _describe(number: int, name: str, plan: TaskPlan, arm: ArmPlan, samples: int, seed: int) -> JsonObject:
    import numpy as np

    return {
        "task": number,
        "name": name,
        "label": plan.task.workload.label,
        "workload_id": plan.task.workload.id,
        "template": arm.template.name,
        "size": str(arm.space.size),
        "configurations": arm.space.size.count,
        "exact": arm.space.size.exact,
        "knobs": [
            {"name": knob.name, "doc": knob.doc, "values": list(knob.values), "default": arm.default[knob.name]}
            for knob in arm.space.knobs
        ],
        "constraints": [constraint.reason for constraint in arm.space.constraints],
        "samples": [dict(sample) for sample in arm.space.sample(samples, np.random.default_rng(seed))],
    }


def _check_config(text: str, arms: list[tuple[int, TaskPlan, ArmPlan]], as_json: bool) -> None:
    from schedsearch.config import Config

    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(
            f'--config is not JSON: {error.msg} at column {error.colno}; e.g. \'{{"bm": 64, "bn": 128}}\''
        ) from None
    if not isinstance(values, dict) or not all(isinstance(value, int | str | bool) for value in values.values()):
        raise UsageError(f"--config must be a JSON object from knobs to numbers, strings or booleans, got {text}")
    config = Config(values)
    reasons = [(number, arm.template.name, arm.space.check(arm.template.current(config))) for number, _, arm in arms]
    if as_json:
        render.echo_json([{"task": n, "template": name, "legal": not why, "reasons": why} for n, name, why in reasons])
    else:
        for number, name, why in reasons:
            render.say(f"task {number}, {name}: " + ("legal" if not why else "illegal: " + "; ".join(why)))
    if all(why for _, _, why in reasons):
        raise ConfigError(
            "the configuration is illegal for every task and template given; see the reasons on standard output"
        )


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def templates(as_json: bool) -> None:
    """List the built-in templates and those that other packages install (entry-point group schedsearch.templates)."""
    from schedsearch.template import load_templates
    from schedsearch.template.registry import BUILT_IN, OF_DECORATORS

    loaded = load_templates()
    found = [
        {
            "template": template.name,
            "version": template.version,
            "op": ", ".join(template.ops),
            "kind": template.kind,
            "source": "built in" if template.name in BUILT_IN | OF_DECORATORS else type(template).__module__,
            "about": (type(template).__doc__ or "").strip().partition("\n")[0],
        }
        for template in loaded.values()
    ]
    for problem in loaded.problems.values():
        render.note(f"warning: {problem}")
    if as_json:
        render.echo_json(found)
        return
    headers = ("template", "version", "op", "kind", "source", "about")
    render.say(render.table(headers, [[entry[name] for name in headers] for entry in found]))


@click.command("workload-schema")
@click.option(
    "--output", metavar="FILE", type=click.Path(dir_okay=False), help="Write to a file instead of standard output."
)
def workload_schema(output: str | None) -> None:
    """Print the JSON Schema of workload files, for editors. It includes the operators of installed packages."""
    from pathlib import Path

    from schedsearch.ops import operators
    from schedsearch.records.output import new_file
    from schedsearch.workload_file import json_schema

    usable, problems = operators()
    for problem in problems:
        render.note(f"warning: {problem}")
    text = json.dumps(json_schema(usable.values()), indent=2)
    if output is None:
        render.say(text)
        return
    with new_file(Path(output)) as file:
        file.write(f"{text}\n".encode())
