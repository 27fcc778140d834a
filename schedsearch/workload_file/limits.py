"""How much work one workload file may take to read.

A file of a few hundred bytes can ask for more work than any machine can do: aliases and merge keys multiply, and defaults
are merged into every task. Work is therefore counted in steps, and a file that needs more than MAX_STEPS is refused, on
every machine alike. Reading a file takes at most about two seconds.
"""

from __future__ import annotations

MAX_FILE_BYTES = 256 << 10  # ruamel.yaml, in Python, reads about 0.5 MiB of comments per second
MAX_STEPS = 150_000  # a file of 1,000 tasks takes about 130,000
MAX_DEPTH = 32  # of lists and mappings, and of merge keys; a workload file needs five
MAX_SCALAR_CHARACTERS = 1000
MAX_DIGITS = 40  # of an integer
MAX_PROBLEMS = 100  # mistakes that are reported

NODE_STEPS = 3  # to parse a value or a key
VALUE_STEPS = 1  # to build a value, once for each alias of it
MERGE_STEPS = 1  # to take over an entry of a merged mapping
TASK_STEPS = 20  # to check a task, besides a step for each of its values


class TooMuchWork(Exception):
    """The budget of steps is used up. The text is the message for the user."""


class Steps:
    """Counts the steps that reading a file takes: at most MAX_STEPS.

    Attributes:
        taken: the number of steps so far.
    """

    def __init__(self) -> None:
        self.taken = 0
        self._limit = MAX_STEPS

    def take(self, count: int) -> None:
        """Counts further steps.

        Raises:
            TooMuchWork: there were too many.
        """
        self.taken += count
        if self.taken > self._limit:
            raise TooMuchWork(
                f"reading this file takes more than {self._limit:,} steps; values, aliases, merge keys and tasks count, and "
                "defaults count in each task; write fewer of them, or split the file"
            )


def values_in(value: object) -> int:
    """The number of values in a value that is built: itself, and those inside lists and mappings."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(values_in, inside))
