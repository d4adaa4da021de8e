"""This machine: disk, processes, hardware."""
