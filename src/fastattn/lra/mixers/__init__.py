"""Mixers that are not an attention mechanism of fastattn; each takes ``(x, padding)``."""
