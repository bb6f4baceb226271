"""Networks and data sets by name."""
