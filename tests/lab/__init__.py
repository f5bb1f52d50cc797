"""Two DGX Sparks on one Linux machine, and what they talk to."""
