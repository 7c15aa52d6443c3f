"""Random programs of views and writes, run on the CPU and on the device side by side."""
