"""Profile a network: grid, design of configurations, measuring, the table."""
