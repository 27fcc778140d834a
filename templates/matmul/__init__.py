"""Products of matrices: dense and batch_matmul, one way to run them a file."""
