"""For the tests of templates and tuners of other packages: contracts to subclass, and emulators that run CUDA
kernels thread by thread in Python."""
