"""Compares evidence and interprets the outcome (paper, section 5).

Plain data in, verdicts out: nothing here imports torch. Only ``records`` and ``recovery.restart_plan`` use
files.
"""
