"""HTTP to a frontend, for workers and the CLI."""
