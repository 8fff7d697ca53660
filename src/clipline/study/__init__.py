"""Studies: the paper's experiments, made again. Begin with `paper`, which holds its rules and figures."""
