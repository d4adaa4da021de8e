"""Unpacking of layers and archives into directory trees."""
