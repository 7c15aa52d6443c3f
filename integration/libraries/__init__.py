"""Programs over libraries of others, which are told ``device="tpu"`` and nothing else.

A program is a generator function: it takes the name of a device and yields a name and a tensor for
each result. `test_libraries` compares those of the device with the CPU's.
"""
