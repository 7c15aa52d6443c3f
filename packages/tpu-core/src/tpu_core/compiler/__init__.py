"""From a recorded segment to an executable: StableHLO through JAX, then XLA, with the cache
around it.
"""
