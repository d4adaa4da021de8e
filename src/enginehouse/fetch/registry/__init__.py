"""Images from OCI registries."""
