"""What the C++ recorder asks of Python: how an overload is recorded, and what its outputs are.

`describe` answers once per overload, `miss` once per signature; neither runs on the hot path.
"""
