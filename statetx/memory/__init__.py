"""The memory of a compiled program, buffer by buffer: live buffers at the peak, their owners, changes to save."""
