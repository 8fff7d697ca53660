"""How a cohort is trained: everything that exists to be fast, behind the protocols of `federated/backend.py`.

Begin with `problem.py` (what every trainer shares), then `one_by_one.py` (the plain trainer) and `choose.py`. Rooms for
speed: `stacked/`, `single_step/`, `sparse/`, `cpu/`, `kernels/`, `programs/` (compiled steps), `parallel/` (processes);
`isolation/` keeps users apart.
"""
