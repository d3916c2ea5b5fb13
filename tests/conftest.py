"""Before any test module imports torch: tests share their cores with the workers they start."""

from runtime.hardware import wait_without_spinning

wait_without_spinning()
