"""Studies of the paper: its tables and figures, made again. Begin with `paper_tables` and `paper_figures`."""
