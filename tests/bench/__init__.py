"""Figures of speed and size, each with the limit that it must hold: `python -m tests.bench [GROUP ...]`."""
