"""`schedsearch worker`: lends this machine's cores and devices to the runs of a fleet."""

from __future__ import annotations

import click

from schedsearch.cli.options import AtLeast, fleet_options


@click.command()
@click.argument("scheduler", metavar="SCHEDULER")
@click.option("--builds", metavar="N", type=AtLeast(0), help="Candidates to build at once; 0: none. Default: one per core.")
@click.option("--cores", metavar="LIST", help="Use these cores only, e.g. 0-3,8; other workers of this host have others.")
@click.option("--only-build", is_flag=True, help="Lend no device.")
@click.option("--name", metavar="NAME", help="What the scheduler calls this worker.")
@fleet_options
def worker(
    scheduler: str,
    builds: int | None,
    cores: str | None,
    only_build: bool,
    name: str | None,
    tls: str | None,
    trust_network: bool,
) -> None:
    """Lend this machine to the runs of a fleet: a Dask worker of SCHEDULER, tcp://HOST:PORT or tls://HOST:PORT.

    It builds on its cores and measures on its GPUs (CUDA_VISIBLE_DEVICES says on which), or on its CPU. A run that hangs or
    crashes a kernel loses a child process, not the worker. Whoever reaches the scheduler runs code here.
    """
    from schedsearch.fleet.connection import Connection
    from schedsearch.fleet.start import become_worker

    connection = Connection(scheduler, tls, trust_network)
    become_worker(connection, builds=builds, cores=cores, measures=not only_build, name=name)
