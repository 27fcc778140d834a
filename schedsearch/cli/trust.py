"""`schedsearch records trust`: whose machine code may run here."""

from __future__ import annotations

import datetime

import click

from schedsearch.cli import render
from schedsearch.text import printable


@click.command(short_help="Allow the kernels of a database to run on this machine.")
@click.argument("file", metavar="[FILE]", type=click.Path(), required=False)
@click.option("--list", "show", is_flag=True, help="Show the files whose kernels are trusted.")
@click.option("--remove", is_flag=True, help="Trust the kernels of FILE no more. The file may be gone.")
def trust(file: str | None, show: bool, remove: bool) -> None:
    """Allow the kernels that a database holds now to run on this machine.

    A kernel is a program: it runs with all your rights. Its results are taken as verified by whoever wrote the file. Trust
    only files from people you trust. The mark is of the content: it holds wherever the file is copied or moved, and not for
    what comes into the file later.
    """
    if show == bool(file) or (show and remove):
        raise click.UsageError("give FILE (with --remove to take its marks back), or --list alone")
    if file is None:
        _say_trusted()
    elif remove:
        _say_distrusted(file)
    else:
        _say_newly_trusted(file)


def _say_trusted() -> None:
    from schedsearch.records.trust import sources

    found = sources()
    for each in found:
        when = datetime.datetime.fromtimestamp(each.last_s).isoformat(" ", "minutes")
        render.say(f"{when}  {render.counted(each.marks, 'kernel'):>12}  {printable(each.path) or '(of a damaged mark)'}")
    if not found:
        render.say("no kernels of other machines are trusted here")


def _say_distrusted(file: str) -> None:
    from schedsearch.records.trust import distrust

    count = distrust(file)
    render.say(
        f"{render.counted(count, 'kernel')} of {printable(file)} trusted no more"
        if count
        else f"no kernel of {printable(file)} was marked as trusted; schedsearch records trust --list shows what is"
    )


def _say_newly_trusted(file: str) -> None:
    from schedsearch.records.trust import trust as trust_file

    found = trust_file(file)
    if not found.kernels:
        render.say(printable(f"{file} holds no machine code; there is nothing to trust"))
        return
    kernels = f"{render.counted(found.kernels, 'kernel')} in {printable(file)}, {found.marked} newly trusted"
    render.say(
        f"{kernels}: their machine code now runs on this machine with all your rights. Kernels that come into the file "
        "later are not trusted by this"
    )
