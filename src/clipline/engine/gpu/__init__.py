"""What exists for a GPU alone: programs that are compiled, recorded and replayed, kernels, and streams.

Begin with `recorded_step.py`: a step of a stack as a program, and blocks of users trained by it. `programs/` compiles
and stores, `kernels/` has the operations, `streams.py` work beside the current stream. A stack is handed in: nothing
here imports `stacked/`, whose layers are made of these operations.
"""
