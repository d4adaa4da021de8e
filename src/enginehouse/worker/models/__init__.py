"""The files of models on this machine."""
