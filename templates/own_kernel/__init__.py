"""Kernels that users wrote and decorated with `schedsearch.tunable`: their definition, templates and reference."""
