"""What is special about LocalAI's Go workers, and nowhere else."""
