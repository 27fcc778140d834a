"""Nodes of ONNX that become compositions of others for which there are kernels, one module a subject. Each module has a
mapping from ONNX operator to rewrite, which `schedsearch.network.rewrites` merges."""
