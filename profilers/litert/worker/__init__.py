"""Scripts that run in an environment of their own (see `profilers.litert.client`): nothing here imports the rest of
dsa_hw."""
