"""Two-dimensional convolution: one way to run it a file."""
