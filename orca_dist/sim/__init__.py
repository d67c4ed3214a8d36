"""The simulator: the server's own Scheduler on a virtual clock.

What takes time is a cost model; everything that is decided is decided by core.
Imports neither torch, ray nor gRPC.
"""
