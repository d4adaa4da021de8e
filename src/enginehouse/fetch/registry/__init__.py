"""Images from OCI registries: requests, authentication, credentials."""
