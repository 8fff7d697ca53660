"""The paper's experiments, by clipline's public names alone: six tasks, their data and stand-ins, figures and tables.

Begin with `facts`, what is known of each task, then with `tasks/emnist_cr.py`, a short one. `study/` makes the figures,
`data/` reads the original files, and `cli.py` is `clipline reproduce`.
"""
