"""Code that is specific to LocalAI's Go workers; it belongs here and nowhere else."""
