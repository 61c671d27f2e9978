"""A plan: its record, what it takes and costs, its text and picture, its use."""
