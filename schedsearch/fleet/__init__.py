"""Building and measuring on Dask workers of many hosts; tuner, journal and store stay where the run was started.

`client` is the run's end, `host` what runs in a worker. Only `client`, `preload` and `start` know Dask.
"""

from schedsearch.fleet.connection import Connection

__all__ = ["Connection"]
