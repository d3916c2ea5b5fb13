"""Before any test module imports torch: tests share their cores with the workers they start.

Properties are tried on the same examples everywhere, however slow the machine.
"""

import os

from hypothesis import HealthCheck, settings

from runtime.hardware import wait_without_spinning

wait_without_spinning()
os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are defined: they run on the CPU here
settings.register_profile("baton", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("baton")
