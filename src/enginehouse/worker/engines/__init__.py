"""Engine processes: start, supervise, confine, stop."""
