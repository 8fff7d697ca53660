"""How a cohort is trained: everything that exists to be fast, behind the protocols of `federated/backend.py`.

Begin with `core/problem.py` (what every trainer shares), then `core/one_by_one.py` (the plain trainer) and `choose.py`.

Imports go down only, and `tests/test_structure.py` reads them: `isolation` <- `core` <- `gpu` <- `stacked`, and
`workers` beside `stacked`. `isolation/` keeps users apart and knows only a module, a loss and made-up examples, so the
plain trainer in `core/` can stand on it. `gpu/` has kernels and programs, of which `stacked/` is made on a GPU.
`workers/` are processes that run any trainer. The files beside these rooms are above them all: `choose.py` puts the
parts together and hands to `core/` what is above it, such as layers that run in a stack.
"""
