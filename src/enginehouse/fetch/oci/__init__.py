"""What images have in common wherever they are stored: manifests, choice of the platform, blobs on the local disk."""
