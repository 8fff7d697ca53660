"""How a cohort is trained: everything that exists to be fast, behind the protocols of `federated/backend.py`.

Begin with `core/problem.py` (what every trainer shares), then `core/one_by_one.py` (the plain trainer) and `choose.py`.
Rooms: `isolation/` keeps users apart, `stacked/` trains many users as one program, `gpu/` compiles and records such a
program and has kernels, `workers/` are processes.
"""
