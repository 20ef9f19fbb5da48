"""What a run will need: memory, bytes moved, and the arithmetic of its batches, from the configuration alone."""
