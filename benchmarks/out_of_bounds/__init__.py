"""Calls of operators aimed outside of their tensors, in processes where such a reach is seen."""
