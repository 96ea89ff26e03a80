"""A CUDA device that is none: kernels compiled for the host and a driver library that runs them (docs/kernels.md)."""

from support.emulated_cuda.build import BuildError, NoCompilerError, ensure_built

__all__ = ["BuildError", "NoCompilerError", "ensure_built"]
