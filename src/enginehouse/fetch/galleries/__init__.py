"""Gallery documents, sources and their stored copies. The only door to YAML."""
