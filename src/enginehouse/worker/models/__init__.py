"""Models' files on this machine."""
