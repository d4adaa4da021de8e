"""Parts of bench/page.py: the server of the page, the browser that shows it, and a frontend with many watchers."""
