"""Errors travel between processes."""

from __future__ import annotations

import pickle

import pytest

from schedsearch import errors
from schedsearch.device.cuda_driver import DriverError

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.SchedsearchError)]


@pytest.mark.parametrize("kind", [*KINDS, DriverError])
def test_an_error_can_be_made_of_its_text_and_goes_through_pickle(kind: type[errors.SchedsearchError]) -> None:
    """A child process sends the kind and the text; the parent raises it again."""
    error = kind("what went wrong")
    assert "what went wrong" in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind and str(again) == str(error)
