"""`python -m schedsearch` is the command `schedsearch`."""

from schedsearch.cli.main import main

main()
