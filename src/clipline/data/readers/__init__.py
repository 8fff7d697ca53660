"""Readers, one for each format: tables and dataframes with a user column, TFF's HDF5 and SQLite, word and tag lists.

Each gives chunks (`..chunks`): some rows at a time, with the id of each row's user. Begin with `tables`.
"""
