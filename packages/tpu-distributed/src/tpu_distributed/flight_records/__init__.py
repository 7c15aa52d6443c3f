"""The flight recorder: which collectives were called last, on each rank."""
