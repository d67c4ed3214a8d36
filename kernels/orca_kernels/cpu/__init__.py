"""Kernels for CPUs in C++, compiled for this machine at first use."""
