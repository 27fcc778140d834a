"""Networks: what a model file computes, as workloads.

`read_model` reads an ONNX file and simplifies its graph, `extract` finds the layers that schedsearch has operators for.
Needs the extra `network` (onnx, onnx-ir, onnxscript).
"""
