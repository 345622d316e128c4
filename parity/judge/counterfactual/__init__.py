"""Changed conditions under which two arms that differ agree bit for bit, and the search for the smallest set."""
