"""Origins that are not registries: archives from web servers, image layouts and tars from the local disk."""
