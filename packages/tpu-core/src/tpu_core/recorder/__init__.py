"""Python side of the C++ recorder: schemas of overloads and metadata of their outputs.

`describe` answers once per overload, `miss` once per signature; neither runs on the hot path.
"""
