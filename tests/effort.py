"""How hard property tests try: a few examples in ``make test``, many in ``make test-long``."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

__all__ = ["examples", "long"]

#: Marks a case that only ``make test-long`` runs: ``pytest.param(16, marks=long)``.
long = pytest.mark.long


def examples(few: int, many: int, **options: Any) -> settings:
    """Settings of a property test that takes seconds: so many examples, or so many with ``MYCEL_TESTS=long``."""
    count = many if os.environ.get("MYCEL_TESTS") == "long" else few
    return settings(max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow], **options)
