"""Scripts that run in an environment of their own (see `profilers.worker`): nothing here imports the rest of dsa_hw."""
