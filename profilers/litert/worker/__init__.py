"""Scripts that run in an environment of their own (`profilers.litert.client`); they import nothing else of dsa_hw."""
