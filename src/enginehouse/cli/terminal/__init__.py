"""What a person sees: tables, bars, progress lines."""
