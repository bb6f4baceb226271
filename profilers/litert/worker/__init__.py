"""Scripts that run in an environment of their own.

They import nothing else of dsa_hw; see `profilers.litert.client`.
"""
