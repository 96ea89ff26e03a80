"""Quantising model files: file types, mixtures, importance matrices, and the pass over a file."""
