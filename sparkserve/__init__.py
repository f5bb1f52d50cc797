"""sparkserve: serve one large model across two NVIDIA DGX Spark, and prove every step."""

__version__ = "0.1.0"
