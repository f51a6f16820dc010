"""Tests the devices, machines and links of a job before it starts."""
