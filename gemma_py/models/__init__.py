"""What a model is: its config, one file a family."""
