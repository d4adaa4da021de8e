"""Everything that is specific to LocalAI's Go workers; no other package knows about them."""
