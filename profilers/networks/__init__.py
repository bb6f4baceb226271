"""Build the networks that are measured: export, narrowing, chains of layers."""
