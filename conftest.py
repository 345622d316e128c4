"""Loads parity's pytest plugin; the plugin finds the families beside this file."""

pytest_plugins = ["parity.plugin"]
