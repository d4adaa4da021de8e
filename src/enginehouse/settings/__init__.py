"""The settings of each program, and how their values are read."""
