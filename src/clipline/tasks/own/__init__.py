"""Tasks of the user's own, in a Python file: read, run, and written anew by `clipline new-task`.

Begin with `task_file`, which runs a file and says what is wrong with it; `own_task` makes a task of it. `new_task`
writes a file to begin with.
"""
