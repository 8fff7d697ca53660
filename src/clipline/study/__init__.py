"""Many runs, kept in a folder (`runs/`): the paper's experiments (`paper/`), its tuning recipe (`tune/`), their page.

Begin with `runs/study.py`, which runs what is missing and keeps the records; `report/` writes the page.
"""
