"""Which keys a file has: their units, defaults and checks, and how a file is read. Imports no torch: it is fast."""
