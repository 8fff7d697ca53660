"""The paper's experiments as code: `protocol` (how many rounds, which grids), `rules` (what is chosen, and how),
`experiments` (Figures 3 to 7), `figures` (their pictures); Figures 1 and 2 and Table 1 in files of their own.
"""
