"""The parts of images common to registries and archives: manifests, platform selection, blobs on the local disk."""
