"""`schedsearch doctor --scheduler`: what the workers of a fleet are and have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from schedsearch.cli import render
from schedsearch.errors import DeviceError
from schedsearch.progress import shown
from schedsearch.text import printable
from schedsearch.typed import JsonObject

if TYPE_CHECKING:
    from schedsearch.fleet.connection import Connection
    from schedsearch.fleet.roster import Kind, Member, Roster


def show(connection: Connection, as_json: bool) -> None:
    """Prints workers, cards, clocks and versions, and what is wrong with them.

    Raises:
        DeviceError: the scheduler is not there, no worker can be used, or their compilers differ and the connection does
            not allow it.
    """
    from schedsearch.fleet.client import Fleet

    with Fleet(connection) as fleet:
        with shown(not as_json):
            fleet.wait_for_members()
        roster = fleet.roster
        problems, refusal = roster.problems, _refusal(roster)
        if as_json:
            render.echo_json(
                {
                    "scheduler": connection.address,
                    "workers": [_facts(member) for member in roster.members.values()],
                    "refused": roster.refused,
                    "problems": problems + ([refusal] if refusal else []),
                }
            )
        else:
            _print(roster)
            for problem in problems:
                render.say(printable(f"! {problem}"))
    if refusal:
        raise DeviceError(refusal)


def _refusal(roster: Roster) -> str:
    """Why no run would begin here; "" if one would."""
    if not roster.members:
        return f"{roster.connection.address} has no worker that can be used; start one: {roster.connection.worker_command}"
    there = {device.kind for device, _ in roster.devices().values()}
    kinds: tuple[Kind, ...] = ("cuda", "cpu")
    for kind in kinds:
        if kind in there:
            try:
                roster.builders(kind)
            except DeviceError as error:
                return str(error)
    return ""


def _facts(member: Member) -> JsonObject:
    return {"address": member.address, "builds": member.builds, "clock_s": member.clock_s, **member.facts}


def _print(roster: Roster) -> None:
    rows = []
    for member in sorted(roster.members.values(), key=lambda member: (str(member.facts["host"]), member.address)):
        facts = member.facts
        rows.append(
            (
                printable(str(facts["host"])),
                member.address,
                str(member.builds),
                f"{member.clock_s:+.1f} s" if member.clock_s else "agrees",
                printable(f"schedsearch {facts['schedsearch']}, Python {facts['python']}"),
            )
        )
    render.say(render.table(("host", "worker", "builds", "clock", "versions"), rows, right=("builds",)))
    clocks = {
        device["uuid"]: found
        for member in roster.members.values()
        for device, found in zip(member.facts["devices"], member.facts["clocks"])
    }
    devices = [
        (
            printable(device.host),
            f"cuda:{device.ordinal}" if device.kind == "cuda" else "cpu",
            printable(device.name),
            printable(device.uuid),
            str(len(at)),
            printable(render.config_text(clocks.get(device.uuid, {}))) or "unknown",
        )
        for device, at in roster.devices().values()
    ]
    if devices:
        header = ("host", "device", "name", "uuid", "workers", "clocks")
        render.say("\n" + render.table(header, devices, right=("workers",)) + "\n")
    toolchains = {
        (kind, ", ".join(f"{name} {number}" for name, number in sorted(versions.items())))
        for member in roster.members.values()
        for kind, versions in member.toolchains.items()
    }
    for kind, text in sorted(toolchains):
        count = sum(
            ", ".join(f"{name} {number}" for name, number in sorted(member.toolchains.get(kind, {}).items())) == text
            for member in roster.members.values()
        )
        render.say(printable(f"compilers for {kind}: {text} ({render.counted(count, 'worker')})"))
