"""Identifiers. All are opaque strings; only their makers know the form."""

from __future__ import annotations

from typing import NewType

JobId = NewType("JobId", str)
WorkerId = NewType("WorkerId", str)
LeaseId = NewType("LeaseId", str)
GroupId = NewType("GroupId", str)
PolicyVersion = NewType("PolicyVersion", int)
"""Number of optimiser steps behind these weights; only grows."""
