"""What a model is: its description, its weights, and the specification of its arithmetic."""
