"""Starting the processes of TPU hosts and slices, each with a chip of its own."""
