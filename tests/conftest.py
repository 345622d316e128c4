"""What all tests share: hypothesis without a clock, since the machine is shared, and without files of its own; and Ctrl-C."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

settings.register_profile("parity", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("parity")

# a shell that runs tests in the background ignores it, and so would every process that they start and interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)
