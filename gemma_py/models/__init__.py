"""Model families: how a config is read, what the tensors are called, and the program of a forward pass."""
