"""LiteRT and Vela, run in an environment of their own."""
