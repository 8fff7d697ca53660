"""Many runs as one study: what a run is, where its record is kept, and how those that are missing are run.

Begin with `record`, which says what decides a run's identity, then `directory` and `study`.
"""
