"""Schedules, which define which layers run for which generated token, and the file of a checkpoint that holds one."""
