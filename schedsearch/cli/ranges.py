"""`schedsearch records ranges`, and the text about the kernels of a range of sizes that several commands print."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from schedsearch.cli import render
from schedsearch.cli.stores import db_option, json_option, open_store, target_key, target_option
from schedsearch.typed import JsonObject

if TYPE_CHECKING:
    from schedsearch.records.size_tables import SizeTableRow
    from schedsearch.size_table import SizeTable


@click.command("ranges", short_help="List the kernels of ranges of sizes.")
@db_option
@target_option
@json_option
def ranges(db: str, selector: str | None, as_json: bool) -> None:
    """List the kernels of ranges of sizes: which serves what, for which sizes it was verified, what specialising would gain.

    `schedsearch tune` makes them of tasks such as n: 1..64.
    """
    from schedsearch.size_table import SizeTable

    with open_store(db) as store:
        rows = store.ranges(target=target_key(selector))
    found = [(row, SizeTable.from_bytes(row.size_table, row.code)) for row in rows]
    if as_json:
        render.echo_json([_json(row, table) for row, table in found])
        return
    if not found:
        render.say(
            f"no kernels of ranges of sizes in {db}; a task with a range, e.g. n: 1..64, makes them: schedsearch tune"
        )
    for number, (row, table) in enumerate(found):
        made_at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.made_at))
        size = render.size_bytes(len(row.size_table) + len(row.code))
        trust = "" if row.vouched else f"; not signed here: schedsearch records trust {db}"
        render.say(("\n" if number else "") + f"{row.label} on {row.target_key} in mode {row.mode}")
        render.say(f"{render.counted(len(table.kernels), 'kernel')}, {size}, made at {made_at}{trust}")
        render.say(table_text(table))


def _json(row: SizeTableRow, table: SizeTable) -> JsonObject:
    return {
        "label": row.label,
        "target": row.target_key,
        "mode": row.mode,
        "low": row.low,
        "high": row.high,
        "made_at": row.made_at,
        "vouched": row.vouched,
        "bytes": len(row.size_table) + len(row.code),
        "serves": [list(each) for each in table.serves],
        "kernels": [
            {
                "template": each.template,
                "config": dict(each.config),
                "verified": list(each.verified),
                "times_ns": {str(size): time_ns for size, time_ns in sorted(each.times_ns.items())},
            }
            for each in table.kernels
        ],
        "over_specialised": {str(size): gain for size, gain in table.gains.items()},
    }


def table_text(table: SizeTable, name: str = "size") -> str:
    """A line for each stretch of sizes that a kernel serves, and what specialising would still gain.

    Args:
        name: of the size.
    """
    rows = []
    for low, high, index in table.serves:
        kernel = table.kernels[index]
        inside = [size for size in kernel.verified if low <= size <= high]
        gains = [f"{size}: {gain:.2f}" for size, gain in table.gains.items() if low <= size <= high]
        times = f"{render.duration(kernel.times_ns[low])} to {render.duration(kernel.times_ns[high])}"
        sizes = str(low) if low == high else f"{low} to {high}"
        rows.append((sizes, kernel.template, times, ", ".join(map(str, inside)), ", ".join(gains)))
    headers = (name, "template", "time", "verified for", f"over the best for this {name} alone")
    return f"{render.table(headers, rows)}\n{_gain_line(table, name)}"


def _gain_line(table: SizeTable, name: str) -> str:
    if not table.gains:
        return "what specialising would still gain is not known: no searched size was measured in both ways"
    size, most = max(table.gains.items(), key=lambda each: each[1])
    if most <= 1:
        return f"specialising would gain nothing at the searched sizes ({', '.join(map(str, table.gains))})"
    return (
        f"specialising would still gain up to {most:.2f}x ({name} = {size}), {table.mean_gain:.2f}x in geometric mean over "
        f"{render.counted(len(table.gains), 'searched size')}; schedsearch.compile of such a size alone takes its own kernel"
    )
