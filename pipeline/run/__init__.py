"""Executes the stages of a job on Ray Data, or one after the other in this process.

`stages` describes them and imports no ray; a backend imports `stages`, report, generate, input and runtime.
"""
