"""Images and archives from web servers and local files."""
