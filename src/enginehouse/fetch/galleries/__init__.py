"""Gallery documents, their sources and stored copies. The only package that imports YAML."""
