"""From a checkpoint's tensors to the arrays that kernels read: checked, packed, and kept on disk."""
