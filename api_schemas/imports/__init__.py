"""Readers of other projects' files: each returns the part of a job that a file describes, and what it leaves over.

A reader sets only what the file says. What depends on something that the file lacks, as a batch on the number of processes,
is left over with that reason; nothing is guessed.
"""
