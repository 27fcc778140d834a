"""Test classes and emulators for authors of operators, templates, tuners and stores in other packages.

- `op_contract.OpContract`, `template_contract.TemplateContract`, `tuner_contract.TunerContract`,
  `store_contract.StoreContract`: test classes to subclass.
- `emulator`, `hopper_emulator`, `cluster_emulator`: run CUDA kernels thread by thread in Python, without a GPU.

All of them need the extra `testing`.
"""
