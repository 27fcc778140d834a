"""Tunes on the GPUs of a SLURM cluster: dask-jobqueue submits the workers, this process keeps tuner and records.

    pip install 'schedsearch[fleet,cu13]' dask-jobqueue
    python examples/fleet/slurm.py workload.yaml --tls ~/fleet-tls --jobs 4 --partition gpu

Run it where jobs are submitted, e.g. on the login node, in an environment that the nodes see, too. TLS is the folder with
the fleet's certificates; docs/fleet.md says how to make them. Every job is one worker with a GPU and 16 cores.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import schedsearch
from schedsearch.fleet import Connection
from schedsearch.workload_file import load

BUILDS = 15  # candidates that a worker compiles at the same time; one core is left for the measurement


def cluster(tls: Path, partition: str, time: str) -> Any:
    """A scheduler in this process, whose workers are SLURM jobs."""
    from dask_jobqueue import SLURMCluster
    from distributed import Security

    certificate, key = str(tls / "cert.pem"), str(tls / "key.pem")
    security = Security(
        tls_ca_file=str(tls / "ca.pem"), require_encryption=True,
        tls_scheduler_cert=certificate, tls_scheduler_key=key, tls_worker_cert=certificate, tls_worker_key=key,
        tls_client_cert=certificate, tls_client_key=key,
    )  # fmt: skip
    return SLURMCluster(
        queue=partition,
        walltime=time,
        cores=BUILDS + 1,
        processes=1,
        memory="64GB",
        job_extra_directives=["--gres=gpu:1"],
        protocol="tls://",
        security=security,
        shared_temp_directory=str(tls),
        worker_extra_args=[
            "--preload", "schedsearch.fleet.preload", "--resources", f"CPU={BUILDS},GPU=1", "--nthreads", str(BUILDS + 3),
            "--no-dashboard",
        ],
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", help="a workload file")
    parser.add_argument("--tls", type=Path, required=True, help="a folder with certificates that the nodes see")
    parser.add_argument("--jobs", type=int, default=2, help="workers, each with one GPU")
    parser.add_argument("--partition", help="of SLURM")
    parser.add_argument("--time", default="01:00:00", help="of a job, HH:MM:SS")
    parser.add_argument("--show", action="store_true", help="only print the script of a job")
    options = parser.parse_args()
    with cluster(options.tls, options.partition, options.time) as made:
        if options.show:
            print(made.job_script())
            return
        made.scale(jobs=options.jobs)
        made.wait_for_workers(options.jobs)
        fleet = Connection(made.scheduler_address, tls=options.tls)
        summary = schedsearch.tune(load(options.workloads).tasks, "records.db", scheduler=fleet, target="cuda")
    print(summary)


if __name__ == "__main__":
    main()
