"""Helpers shared by the tests: model cache, tiny model writer, goldens, comparison of logits."""
