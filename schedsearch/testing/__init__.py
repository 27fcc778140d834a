"""For the tests of operators, templates and tuners of other packages.

- `op_contract.OpContract`, `template_contract.TemplateContract`, `tuner_contract.TunerContract`,
  `store_contract.StoreContract`: test classes to subclass.
- `emulator`, `hopper_emulator`, `cluster_emulator`: run CUDA kernels thread by thread in Python, where there is no GPU.

They need the extra `testing`.
"""
