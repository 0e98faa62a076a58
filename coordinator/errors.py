"""What stops the coordinator itself; the words name the next step.

CoordinatorError
└── CannotServe       the process cannot start or go on serving
"""

from __future__ import annotations


class CoordinatorError(Exception):
    """Root of the coordinator's own errors."""


class CannotServe(CoordinatorError):
    """The coordinator cannot start, or lost what it needs to go on."""
