"""The paper's experiments as code. Begin with `experiments`, which has Figures 3 to 7 in the order of their runs.

`protocol` says how many rounds and which grids, `rules` what is chosen and how, `grid` which runs are asked for;
`figures` draws, `recompute` computes everything anew from records. Figures 1 and 2 and Table 1 have files of their own.
"""
