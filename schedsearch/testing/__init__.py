"""Test classes and an emulator for authors of operators, templates and tuners in other packages.

- `op_contract.OpContract`, `template_contract.TemplateContract`, `tuner_contract.TunerContract`: test classes to subclass.
- `emulator`: runs CUDA kernels thread by thread in Python, without a GPU.

All of them need the extra `testing`.
"""
