"""Devices to compile for: the machine's own, or a GPU or TPU that is not there."""
