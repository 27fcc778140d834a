"""`python -m schedsearch` is the command `schedsearch`."""

from schedsearch.cli.console import run

run()
