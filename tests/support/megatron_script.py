"""Runs a script for Megatron-Core on CPU: ``python -m tests.support.megatron_script SCRIPT``."""

from __future__ import annotations

import runpy
import sys

from tests.support import megatron_cpu

megatron_cpu.work_around()
runpy.run_path(sys.argv[1], run_name="__main__")
