"""The fused kernels, one package per kind of device; ops.py registers them with torch."""
