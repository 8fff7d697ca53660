"""Many rounds: the public class `Training`, the one loop, options, callbacks and run directories.

Begin with `training`, then `loop`; `callbacks` says what may look on.
"""
