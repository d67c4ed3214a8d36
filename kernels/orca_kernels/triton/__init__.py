"""The operations of a decoder layer on CUDA devices, in Triton: compiled where they first run.

Only this package imports triton, and dispatch imports it only for a CUDA device.
"""
