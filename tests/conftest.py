"""What all tests share: hypothesis without a clock, since the machine is shared, and without files of its own."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("parity", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("parity")
