"""Programs of common ops in buckets of sizes, made ahead by ``tpu cache warm --ops``.

A segment that has no program yet runs op by op by these, whatever its sizes, where they serve most
of its ops; see docs/adr/0033-op-library.md.
"""
