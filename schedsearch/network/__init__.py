"""Networks: what a model computes, as kernel calls.

`read_model` reads an ONNX file and simplifies its graph, `export` a torch module. `lower` makes a `Network` of the graph,
`extract` its distinct workloads, and `plan` chooses layouts.
Needs the extra `network` (onnx, onnx-ir, onnxscript).
"""
