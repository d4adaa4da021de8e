"""The worker's own HTTP server: files for LocalAI's frontends, logs of engines, health."""
