"""Which keys a job, tune or evaluate file has: their units, defaults and checks, and how a file is read.

May import messages and plain types of the engine; imports no torch, so that a typing error is reported soon.
"""
