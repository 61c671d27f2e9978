"""The memory of a compiled program, buffer by buffer: what is alive at the peak, who made it, and what to change."""
