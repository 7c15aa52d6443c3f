"""The overload that a grouped product is on the device; its gradient is two more of it."""

GROUPED_MM = "aten._grouped_mm.default"
