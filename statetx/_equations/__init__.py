"""Jaxprs as values: their structure, their arrays as inputs, their cost."""
