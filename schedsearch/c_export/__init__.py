"""Tuned GPU kernels as C: `schedsearch records export --c DIR`.

`export_c` writes a folder of C files that needs libcuda alone. The launcher, `runtime/*.c`, is the same in each export. For
each kernel there is a file of data: machine code and launch plan.

See docs/decisions/139-exported-kernels-are-data.md.
"""

from schedsearch.c_export.folder import Exported, export_c

__all__ = ["Exported", "export_c"]
